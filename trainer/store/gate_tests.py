"""Read and write the gate's tests in SQL: the tested candidate, the watched live version, and the decisions.

Each move is one transaction that locks the policy and first checks that the state has not changed meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, and_, select

from migrations import schema
from trainer.domain.claims import GateStep
from trainer.domain.gate.verdict import Moments, Verdict
from trainer.store.eligible_groups import unfinished_step
from trainer.store.gate import promoted, rejected
from trainer.store.heldout import Pair, ask, ask_no_more, read_pairs, read_prompts
from trainer.store.rewards import read_looked, read_moments, read_rewards
from whetstone.config.gate import SweptTest
from whetstone.domain.ids import version_id
from whetstone.registry.versions import LedgerError, decide, lock, roll_back

TESTS = ("heldout", "canary")

v, r = schema.policy_versions.c, schema.gate_results.c


@dataclass(frozen=True)
class WatchedVersion:
    """A live version whose rewards are compared with its parent's."""

    version: int
    parent: int
    since: datetime


class GateTables:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project

    def tested(self, policy: str) -> GateStep | None:
        """Return the policy's candidate that is in tests; None without one."""
        with self._reader.connect() as connection:
            return _tested(connection, self._project, policy)

    def watched(self, policy: str) -> WatchedVersion | None:
        """Return the policy's live version while it is watched; None once that is over, or where it has no parent."""
        live = and_(v.project == self._project, v.policy == policy, v.state == "live")
        query = select(v.version, v.parent, v.promoted_at).where(live, v.watched_at.is_(None), v.parent.is_not(None))
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else WatchedVersion(row.version, row.parent, row.promoted_at)

    def prompts(self, policy: str, most: int) -> list[str]:
        """Return the newest prompts of the eval split, as ids of their completions (`trainer.store.heldout`)."""
        with self._reader.connect() as connection:
            return read_prompts(connection, self._project, policy, most)

    def pairs(self, tested: GateStep) -> list[Pair]:
        """Return the results of the held-out answers so far, prompt by prompt."""
        with self._reader.connect() as connection:
            return read_pairs(connection, tested)

    def moments(self, policy: str, version: int, since: datetime) -> Moments:
        """Return the moments of rewards of trajectories that a version began since then, group by group."""
        with self._reader.connect() as connection:
            return read_moments(connection, self._project, policy, version, since)

    def rewards(self, policy: str, version: int, before: datetime, most: int) -> list[float]:
        """Return rewards of trajectories that a version began before then, group by group, the newest first."""
        with self._reader.connect() as connection:
            return read_rewards(connection, self._project, policy, version, before, most)

    def looked(self, policy: str, version: int, test: str, since: datetime) -> int:
        """Return how many looks of a test are over."""
        with self._reader.connect() as connection:
            return read_looked(connection, self._project, policy, version, test, since)

    def begin(
        self,
        tested: GateStep,
        test: SweptTest,
        now: datetime,
        *,
        canary_share: float | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """Start a test of the candidate with a share of the traffic, or with held-out prompts for it and its parent."""
        with self._moving(tested) as connection:
            if connection is None:
                return
            values = {"tested_by": test, "tested_since": now, "canary_share": canary_share}
            _write(connection, tested.project, tested.name_out, **values)
            for source_id in sources:
                ask(connection, tested, source_id)

    def leave(self, tested: GateStep) -> None:
        """End the candidate's test without a result: the settings do not require it any more."""
        with self._moving(tested) as connection:
            if connection is not None:
                _leave(connection, tested)

    def note(self, tested: GateStep, test: str, verdict: Verdict, now: datetime) -> None:
        """Record a look that decided nothing."""
        with self._moving(tested) as connection:
            if connection is not None:
                _decide(connection, tested, test, "testing", verdict, now)

    def measured(self, tested: GateStep, prompts: int, candidate: float, parent: float) -> None:
        """Record mean rewards on the same held-out prompts. A parent that was tested itself keeps its own mean."""
        with self._moving(tested) as connection:
            if connection is not None:
                _write(connection, tested.project, tested.name_out, heldout_mean=candidate, heldout_count=prompts)
                is_it = (v.project == tested.project, v.id == tested.name_in, v.heldout_mean.is_(None))
                values = {"heldout_mean": parent, "heldout_count": prompts}
                connection.execute(schema.policy_versions.update().where(*is_it).values(values))

    def passed(
        self, tested: GateStep, test: str, verdict: Verdict, keep_served: int | None, now: datetime
    ) -> str | None:
        """Record a passed test.

        With `keep_served` it was the last one, and the candidate goes live in the same transaction.

        So the trajectories of its canary never get another version. Return why it is not live; None where it is.
        """
        with self._moving(tested) as connection:
            if connection is None:
                return "another worker or a person has moved a version meanwhile"
            _decide(connection, tested, test, "pass", verdict, now)
            _leave(connection, tested)
            return None if keep_served is None else promoted(connection, tested, keep_served, {}, now)

    def rejected(self, tested: GateStep, test: str, verdict: Verdict, now: datetime) -> None:
        """Record a failed test and end the candidate's step."""
        with self._moving(tested) as connection:
            if connection is not None:
                _decide(connection, tested, test, "reject", verdict, now)
                _leave(connection, tested)
                rejected(connection, tested, f"{test}: {verdict.reason}", {}, now)

    def promoted(self, tested: GateStep, keep_served: int, now: datetime) -> str | None:
        """End the step of a candidate that passed all tests or was decided on by hand.

        Return why it is not live; None where it is.
        """
        with self._moving(tested) as connection:
            if connection is None:
                return "another worker or a person has moved a version meanwhile"
            _leave(connection, tested)
            return promoted(connection, tested, keep_served, {}, now)

    def note_watch(self, policy: str, watched: WatchedVersion, verdict: Verdict, now: datetime) -> None:
        """Record a look at a live version: one that decides nothing yet, or the last one."""
        with self._watching(policy, watched) as connection:
            if connection is not None:
                self._note_watch(connection, policy, watched, verdict, verdict.decision, now)

    def roll_back(
        self, policy: str, watched: WatchedVersion, verdict: Verdict, keep_served: int, now: datetime
    ) -> int | str:
        """Roll back a live version that is worse than its parent to the version before it.

        Return the version that is live again, or why there is none.
        """
        with self._watching(policy, watched) as connection:
            if connection is None:
                return "another worker or a person has moved a version meanwhile"
            try:
                move = roll_back(connection, self._project, policy, None, verdict.reason, keep_served, now)
            except LedgerError as error:
                self._note_watch(connection, policy, watched, verdict, "reject", now)
                return str(error)
            self._note_watch(connection, policy, watched, verdict, "rollback", now)
            return move.live

    def _note_watch(
        self,
        connection: Connection,
        policy: str,
        watched: WatchedVersion,
        verdict: Verdict,
        decision: str,
        now: datetime,
    ) -> None:
        if decision != "testing":
            _write(connection, self._project, version_id(policy, watched.version), watched_at=now)
        decide(
            connection,
            self._project,
            policy,
            watched.version,
            test="watch",
            decision=decision,
            now=now,
            against=watched.parent,
            reason=verdict.reason,
            figures=verdict.figures,
        )

    @contextmanager
    def _moving(self, tested: GateStep) -> Iterator[Connection | None]:
        """Open a transaction under the policy's lock; yield None where the candidate has changed since it was read."""
        with self._engine.begin() as connection:
            lock(connection, tested.project, tested.policy)
            same = _tested(connection, tested.project, tested.policy) == tested
            yield connection if same else None

    @contextmanager
    def _watching(self, policy: str, watched: WatchedVersion) -> Iterator[Connection | None]:
        """Do the same for the live version."""
        with self._engine.begin() as connection:
            row = lock(connection, self._project, policy)
            yield connection if row is not None and row.live_version == watched.version else None


def _tested(connection: Connection, project: str, policy: str) -> GateStep | None:
    step = unfinished_step(connection, project, policy)
    if step is None or step.state != "waiting_gate":
        return None
    p = schema.policies.c
    live = select(p.live_version).where(p.project == project, p.id == policy).scalar_subquery()
    columns = (v.state, v.tested_by, v.tested_since, v.canary_share, live.label("live_version"))
    is_it = (v.project == project, v.policy == policy, v.version == step.version_out)
    version = connection.execute(select(*columns).where(*is_it)).one()
    of_version = (r.project == project, r.policy == policy, r.version == step.version_out)
    passed = select(r.test).where(*of_version, r.decision == "pass", r.test.in_(TESTS))
    return GateStep(
        project=project,
        policy=policy,
        number=step.number,
        attempt=step.attempt,
        kind=step.kind or "grpo",
        version_in=step.version_in,
        version_out=step.version_out,
        state=version.state,
        live_version=version.live_version,
        tested_by=version.tested_by,
        tested_since=version.tested_since,
        canary_share=version.canary_share,
        passed=frozenset(connection.execute(passed).scalars()),
    )


def _leave(connection: Connection, tested: GateStep) -> None:
    """Take the candidate out of its test: no share of the traffic, and missing answers are not generated any more."""
    _write(connection, tested.project, tested.name_out, tested_by=None, canary_share=None)
    ask_no_more(connection, tested)


def _decide(
    connection: Connection, tested: GateStep, test: str, decision: str, verdict: Verdict, now: datetime
) -> None:
    decide(
        connection,
        tested.project,
        tested.policy,
        tested.version_out,
        test=test,
        decision=decision,
        now=now,
        against=tested.version_in,
        reason=verdict.reason,
        figures=verdict.figures,
    )


def _write(connection: Connection, project: str, name: str, **values: Any) -> None:
    is_it = (v.project == project, v.id == name)
    connection.execute(schema.policy_versions.update().where(*is_it).values(values))
