"""The trainer's SQL of tests: the candidate that is in one, the live version that is watched, and what was decided.

Each move is one transaction that locks the policy and begins by making sure that nobody has moved meanwhile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, and_, select

from migrations import schema
from trainer.claims import Tested
from trainer.store_candidates import unfinished_step
from trainer.store_gate import promoted, rejected
from trainer.store_heldout import Pair, ask, ask_no_more, read_pairs, read_prompts
from trainer.store_rewards import read_looked, read_moments, read_rewards
from trainer.verdict import Moments, Verdict
from whetstone.gating import GateTest
from whetstone.ids import version_id
from whetstone.store_versions import LedgerError, decide, lock, roll_back

TESTS = ("heldout", "canary")

v, r = schema.policy_versions.c, schema.gate_results.c


@dataclass(frozen=True)
class Watched:
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

    def tested(self, policy: str) -> Tested | None:
        """The policy's candidate that is in tests; None without one."""
        with self._reader.connect() as connection:
            return _tested(connection, self._project, policy)

    def watched(self, policy: str) -> Watched | None:
        """The policy's live version while it is watched; None once that is over, or where it has no parent."""
        live = and_(v.project == self._project, v.policy == policy, v.state == "live")
        query = select(v.version, v.parent, v.promoted_at).where(live, v.watched_at.is_(None), v.parent.is_not(None))
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else Watched(row.version, row.parent, row.promoted_at)

    def prompts(self, policy: str, most: int) -> list[str]:
        """The newest prompts of the eval split, by the completions they are of (`store_heldout`)."""
        with self._reader.connect() as connection:
            return read_prompts(connection, self._project, policy, most)

    def pairs(self, tested: Tested) -> list[Pair]:
        """What is known of the held-out answers by now, prompt by prompt."""
        with self._reader.connect() as connection:
            return read_pairs(connection, tested)

    def moments(self, policy: str, version: int, since: datetime) -> Moments:
        """Of the rewards of trajectories that a version began since then, group by group."""
        with self._reader.connect() as connection:
            return read_moments(connection, self._project, policy, version, since)

    def rewards(self, policy: str, version: int, before: datetime, most: int) -> list[float]:
        """The newest rewards of trajectories that a version began before then, group by group, the newest first."""
        with self._reader.connect() as connection:
            return read_rewards(connection, self._project, policy, version, before, most)

    def looked(self, policy: str, version: int, test: str, since: datetime) -> int:
        """How many looks of a test are over."""
        with self._reader.connect() as connection:
            return read_looked(connection, self._project, policy, version, test, since)

    def begin(
        self,
        tested: Tested,
        test: GateTest,
        now: datetime,
        *,
        canary_share: float | None = None,
        sources: Sequence[str] = (),
    ) -> None:
        """The candidate goes into a test: with a share of the traffic, or held-out prompts for it and its parent."""
        with self._moving(tested) as connection:
            if connection is None:
                return
            values = {"tested_by": test, "tested_since": now, "canary_share": canary_share}
            _write(connection, tested.project, tested.name_out, **values)
            for source_id in sources:
                ask(connection, tested, source_id)

    def leave(self, tested: Tested) -> None:
        """The settings do not ask for its test any more."""
        with self._moving(tested) as connection:
            if connection is not None:
                _leave(connection, tested)

    def note(self, tested: Tested, test: str, verdict: Verdict, now: datetime) -> None:
        """A look that decided nothing."""
        with self._moving(tested) as connection:
            if connection is not None:
                _decide(connection, tested, test, "testing", verdict, now)

    def measured(self, tested: Tested, prompts: int, candidate: float, parent: float) -> None:
        """Mean rewards on the same held-out prompts; a parent that was tested itself keeps the mean of that."""
        with self._moving(tested) as connection:
            if connection is not None:
                _write(connection, tested.project, tested.name_out, heldout_mean=candidate, heldout_count=prompts)
                is_it = (v.project == tested.project, v.id == tested.name_in, v.heldout_mean.is_(None))
                values = {"heldout_mean": parent, "heldout_count": prompts}
                connection.execute(schema.policy_versions.update().where(*is_it).values(values))

    def passed(self, tested: Tested, test: str, verdict: Verdict, keep_served: int | None, now: datetime) -> str | None:
        """The candidate has passed a test; the last one where `keep_served` is given, and goes live in the same move.

        So its trajectories of the canary never meet another version. Why it is not live; None where it is.
        """
        with self._moving(tested) as connection:
            if connection is None:
                return "somebody else has moved meanwhile"
            _decide(connection, tested, test, "pass", verdict, now)
            _leave(connection, tested)
            return None if keep_served is None else promoted(connection, tested, keep_served, {}, now)

    def rejected(self, tested: Tested, test: str, verdict: Verdict, now: datetime) -> None:
        """The candidate has failed a test; its step is over."""
        with self._moving(tested) as connection:
            if connection is not None:
                _decide(connection, tested, test, "reject", verdict, now)
                _leave(connection, tested)
                rejected(connection, tested, f"{test}: {verdict.reason}", {}, now)

    def promoted(self, tested: Tested, keep_served: int, now: datetime) -> str | None:
        """The candidate has passed all tests, or somebody has decided on it by hand: its step is over, whichever way.

        Why it is not live; None where it is.
        """
        with self._moving(tested) as connection:
            if connection is None:
                return "somebody else has moved meanwhile"
            _leave(connection, tested)
            return promoted(connection, tested, keep_served, {}, now)

    def note_watch(self, policy: str, watched: Watched, verdict: Verdict, now: datetime) -> None:
        """A look at a live version: one that decides nothing yet, or the last."""
        with self._watching(policy, watched) as connection:
            if connection is not None:
                self._note_watch(connection, policy, watched, verdict, verdict.decision, now)

    def roll_back(self, policy: str, watched: Watched, verdict: Verdict, keep_served: int, now: datetime) -> int | str:
        """The live version is worse than its parent: the version before it answers again.

        Which one that is, or why none does.
        """
        with self._watching(policy, watched) as connection:
            if connection is None:
                return "somebody else has moved meanwhile"
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
        watched: Watched,
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
    def _moving(self, tested: Tested) -> Iterator[Connection | None]:
        """A transaction under the policy's lock; None where the candidate is not any more as it was read."""
        with self._engine.begin() as connection:
            lock(connection, tested.project, tested.policy)
            same = _tested(connection, tested.project, tested.policy) == tested
            yield connection if same else None

    @contextmanager
    def _watching(self, policy: str, watched: Watched) -> Iterator[Connection | None]:
        """Likewise for the live version."""
        with self._engine.begin() as connection:
            row = lock(connection, self._project, policy)
            yield connection if row is not None and row.live_version == watched.version else None


def _tested(connection: Connection, project: str, policy: str) -> Tested | None:
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
    return Tested(
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


def _leave(connection: Connection, tested: Tested) -> None:
    """Out of its test: no share of the traffic, and what was not drawn yet is not drawn."""
    _write(connection, tested.project, tested.name_out, tested_by=None, canary_share=None)
    ask_no_more(connection, tested)


def _decide(connection: Connection, tested: Tested, test: str, decision: str, verdict: Verdict, now: datetime) -> None:
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
