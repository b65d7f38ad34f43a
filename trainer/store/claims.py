"""Claim steps in SQL: a step whose worker stopped responding, or a new one, with its groups and trajectories."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ExampleSelection
from trainer.domain.triggers import Choice, choose, last_fired
from trainer.store.baselines import read_comparison
from trainer.store.eligible_groups import (
    lock_candidates,
    read_candidates,
    read_lineage,
    read_live_since,
    unfinished_step,
)
from trainer.store.parts import with_parts
from trainer.store.step_ends import discard, end_step
from whetstone.config.rewards import RewardSettings
from whetstone.config.trainer import BY_EXAMPLE, Kind, TrainerSettings
from whetstone.registry.versions import lock, reject


def hindsight_in_a_row(connection: Connection, project: str, policy: str) -> int:
    """Return how many of the policy's newest promoted steps learned from words, up to the first of another kind."""
    s = schema.steps.c
    of_policy = (s.project == project, s.policy == policy, s.state == "promoted")
    last_other = select(func.coalesce(func.max(s.number), 0)).where(*of_policy, s.kind.is_distinct_from("hindsight"))
    newer = select(func.count()).where(*of_policy, s.number > last_other.scalar_subquery())
    return int(connection.execute(newer).scalar_one())


class Claims:
    """Claims steps within one transaction, at one moment."""

    def __init__(
        self,
        connection: Connection,
        project: str,
        settings: TrainerSettings,
        now: datetime,
        learning: RewardSettings | None = None,
    ) -> None:
        """`learning`: the settings by whose weights the parts of rewards add up; None: parts do not count."""
        self._learning = learning
        self._connection = connection
        self._project = project
        self._settings = settings
        self._now = now

    def next(self, policy: str) -> Claim | None:
        """Claim the policy's next step if there is one; its row is locked until the transaction ends.

        A policy that only records takes only steps requested by hand. If a requested step has nothing to train on, it
        is still created, and ends at once with the reason.
        """
        row, unfinished = self._locked(policy)
        if row is None:
            return None
        if unfinished is not None:
            return self._take_over(unfinished, row.next_version)
        if row.step_asked is None:
            return self._new(row)
        self._update_policy(policy, step_asked=None, step_asked_at=None)
        kind = row.step_asked["kind"]
        return self._new(row) if kind == "grpo" else self._by_examples(row, kind)

    def why_due(self, policy: str) -> str | None:
        """Return why `next` would claim a step; None if it would claim none. Groups that it would discard are."""
        row, unfinished = self._locked(policy)
        if row is None:
            return None
        if unfinished is not None:
            is_left = unfinished.lease_until <= self._now
            return f"{policy}: the worker of step {unfinished.number} has ended" if is_left else None
        if row.step_asked is not None:
            return f"{policy}: a step was requested"
        choice = self._choice(row, by_hand=False)
        if choice.claimed:
            return f"{policy}: a step of {len(choice.claimed)} groups is due"
        self._discard(choice)
        return None

    def _locked(self, policy: str) -> tuple[Any, Any]:
        """Return the rows of the policy and of its unfinished step, locked; no policy where it may take no step."""
        row = lock(self._connection, self._project, policy)
        if row is None or row.state == "paused":
            return None, None
        # Locked, because a transaction that ends the step does not lock the policy.
        unfinished = unfinished_step(self._connection, self._project, policy, lock=True)
        if unfinished is not None and unfinished.state == "waiting_gate":
            return None, None  # its worker is done; `trainer.gate.controller` ends it
        by_hand = row.step_asked is not None or (unfinished is not None and unfinished.asked_at is not None)
        return (row, unfinished) if row.state == "training" or by_hand else (None, None)

    def _take_over(self, step: Any, next_version: int) -> Claim | None:
        """Restart a step whose lease has ended: the same trajectories and baselines, another version number."""
        if step.lease_until > self._now:
            return None
        s, m = schema.steps.c, schema.step_trajectories.c
        if step.version_out is not None:
            self._give_up(step)
        self._update_policy(step.policy, next_version=next_version + 1)
        # The notes of the lost attempt do not apply to this one: it may leave out other trajectories.
        self._connection.execute(
            schema.step_trajectories.update()
            .where(m.project == self._project, m.step_id == step.id)
            .values(advantage=None)
        )
        claim = Claim(
            project=self._project,
            policy=step.policy,
            number=step.number,
            attempt=step.attempt + 1,
            version_in=step.version_in,
            version_out=next_version,
            adapter_in=self._adapter(step.policy, step.version_in),
            created_at=step.created_at,
            baselined=step.baselined or 0,
            kind=step.kind or "grpo",
            asked_at=step.asked_at,
            wanted=ExampleSelection.of(step.imitates) if step.kind in BY_EXAMPLE else None,
        )
        self._connection.execute(
            schema.steps.update()
            .where(s.project == self._project, s.id == step.id)
            .values(
                state="claimed",
                version_out=None,
                attempt=claim.attempt,
                config=self._settings.model_dump(mode="json"),
                lease_until=self._lease_until,
            )
        )
        if claim.attempt > self._settings.max_attempts:
            why = (
                f"given up after {self._settings.max_attempts} attempts; the log of the training worker says why they "
                "ended"
            )
            end_step(self._connection, claim, "failed", self._now, {"error": why})
            return None
        return claim

    def _give_up(self, step: Any) -> None:
        """Reject the candidate of a lost attempt, unless it was promoted by hand."""
        v = schema.policy_versions.c
        is_it = (v.project == self._project, v.policy == step.policy, v.version == step.version_out)
        if self._connection.execute(select(v.state).where(*is_it)).scalar_one() == "candidate":
            reason = "its step was taken over by another worker"
            reject(self._connection, self._project, step.policy, step.version_out, reason, self._now)

    def _new(self, policy: Any) -> Claim | None:
        """Claim a step that learns from rewards, if one is due or requested."""
        by_hand = policy.step_asked_at is not None
        choice = self._choice(policy, by_hand=by_hand)
        self._discard(choice)
        if not choice.claimed and not by_hand:
            return None
        baselines = self._baselines(policy.id, choice)
        claim = self._begin(policy, self._settings.objective, len(baselines))
        self._insert_step(
            claim,
            groups=len(choice.claimed),
            trajectories=sum(len(group.members) for group in choice.claimed),
            discarded={reason: len(group_ids) for reason, group_ids in choice.discarded.items()},
        )
        if not choice.claimed:
            why = f"requested by hand, but there is nothing to train on: {choice.waits_for}"
            end_step(self._connection, claim, "noop", self._now, {"error": why})
            return None
        self._take(claim, choice, baselines)
        return claim

    def _choice(self, policy: Any, *, by_hand: bool) -> Choice:
        """Choose from the scored groups, which stay locked until the transaction ends."""
        # Groups that the schedule does not take yet are not read every second.
        fired = None
        if self._settings.schedule is not None and not by_hand:
            fired = last_fired(self._settings.schedule, self._now)
        lock_candidates(self._connection, self._project, policy.id, fired)
        return choose(
            with_parts(
                self._connection,
                self._project,
                read_candidates(self._connection, self._project, policy.id, fired),
                self._learning,
            ),
            read_lineage(self._connection, self._project, policy.id, policy.live_version),
            self._now,
            self._settings,
            live_since=read_live_since(self._connection, self._project, policy.id, policy.live_version),
            by_hand=by_hand,
        )

    def _discard(self, choice: Choice) -> None:
        for reason, group_ids in choice.discarded.items():
            discard(self._connection, self._project, group_ids, reason)

    def _by_examples(self, policy: Any, kind: Kind) -> Claim | None:
        """Claim a step that imitates, or learns from words. The step itself then selects its examples, if any."""
        claim = self._begin(policy, kind, 0)
        imitates = {name: value for name, value in policy.step_asked.items() if name != "kind"}
        self._insert_step(claim, imitates=imitates)
        most = self._settings.hindsight_in_a_row
        if kind == "hindsight" and hindsight_in_a_row(self._connection, self._project, policy.id) >= most:
            why = (
                f"the last {most} versions learned from words, as many as trainer.hindsight_in_a_row: take a step of "
                "another kind first"
            )
            end_step(self._connection, claim, "noop", self._now, {"error": why})
            return None
        return claim

    def _begin(self, policy: Any, kind: Kind, baselined: int) -> Claim:
        """Build the claim with the policy's next numbers, and advance them."""
        claim = Claim(
            project=self._project,
            policy=policy.id,
            number=policy.next_step,
            attempt=1,
            version_in=policy.live_version,
            version_out=policy.next_version,
            adapter_in=self._adapter(policy.id, policy.live_version),
            created_at=self._now,
            baselined=baselined,
            kind=kind,
            asked_at=policy.step_asked_at,
            wanted=ExampleSelection.of(policy.step_asked) if kind in BY_EXAMPLE else None,
        )
        self._update_policy(policy.id, next_version=claim.version_out + 1, next_step=claim.number + 1)
        return claim

    def _insert_step(self, claim: Claim, **taken: Any) -> None:
        values = {
            "project": self._project,
            "id": claim.id,
            "policy": claim.policy,
            "number": claim.number,
            "kind": claim.kind,
            "asked_at": claim.asked_at,
            "state": "claimed",
            "version_in": claim.version_in,
            "groups": 0,
            "trajectories": 0,
            "baselined": claim.baselined,
            "config": self._settings.model_dump(mode="json"),
            "attempt": claim.attempt,
            "lease_until": self._lease_until,
            "created_at": self._now,
        }
        self._connection.execute(schema.steps.insert().values(values | taken))

    def _take(self, claim: Claim, choice: Choice, baselines: Mapping[str, float]) -> None:
        """Record the trajectories that the step takes, and mark them and their groups as claimed."""
        taken = [
            {
                "project": self._project,
                "step_id": claim.id,
                "trajectory_id": member.trajectory_id,
                "policy": claim.policy,
                "group_id": group.group_id,
                "reward": member.reward,
                "staleness": choice.staleness[member.first_version],
                "baseline": baselines.get(member.trajectory_id),
            }
            for group in choice.claimed
            for member in group.members
        ]
        self._connection.execute(schema.step_trajectories.insert(), taken)
        g, t = schema.groups.c, schema.trajectories.c
        self._connection.execute(
            schema.groups.update()
            .where(g.project == self._project, g.id.in_([group.group_id for group in choice.claimed]))
            .values(state="claimed", step=claim.number)
        )
        self._connection.execute(
            schema.trajectories.update()
            .where(t.project == self._project, t.id.in_([row["trajectory_id"] for row in taken]))
            .values(state="claimed", why_not_trained=None)
        )

    def _baselines(self, policy: str, choice: Choice) -> Mapping[str, float]:
        """Return each single's baseline by id, and store the running means with the step's rewards added."""
        singles = [member for group in choice.claimed if group.alone for member in group.members]
        known, compared = read_comparison(self._connection, self._project, policy, singles, self._settings)
        b = schema.baselines.c
        for (task, end_user), mean in compared.means.items():
            key = {"project": self._project, "policy": policy, "task": task, "end_user": end_user}
            values = {"mean": mean.mean, "count": mean.count, "updated_at": self._now}
            # The policy's row is locked, so no other transaction inserts it meanwhile.
            if (task, end_user) in known:
                is_it = [b[name] == value for name, value in key.items()]
                self._connection.execute(schema.baselines.update().where(*is_it).values(values))
            else:
                self._connection.execute(schema.baselines.insert().values(key | values))
        return compared.baselines

    def _adapter(self, policy: str, version: int) -> Path | None:
        v = schema.policy_versions.c
        query = select(v.adapter_path).where(v.project == self._project, v.policy == policy, v.version == version)
        folder = self._connection.execute(query).scalar_one()
        return None if folder is None else Path(folder)

    def _update_policy(self, policy: str, **values: Any) -> None:
        p = schema.policies.c
        is_it = (p.project == self._project, p.id == policy)
        self._connection.execute(schema.policies.update().where(*is_it).values(**values))

    @property
    def _lease_until(self) -> datetime:
        return self._now + timedelta(seconds=self._settings.lease_s)
