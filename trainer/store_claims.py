"""The trainer's SQL of claims: a step whose worker went silent, or a new one, and what it takes. Decides nothing."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, and_, func, select

from migrations import schema
from trainer.baselines import Key, Mean, compare
from trainer.claims import Candidate, CandidateMember, Choice, Claim, choose, lineage_of
from trainer.store_ends import UNFINISHED, discard, end_step
from whetstone.settings import TrainerSettings


class Claims:
    """What may be claimed in one transaction, at one moment."""

    def __init__(self, connection: Connection, project: str, settings: TrainerSettings, now: datetime) -> None:
        self._connection = connection
        self._project = project
        self._settings = settings
        self._now = now

    def next(self, policy: str) -> Claim | None:
        """Take the policy's next step if there is one; its row is locked until the transaction ends."""
        row = self._locked_policy(policy)
        if row is None or row.state != "training":
            return None
        unfinished = self._unfinished(policy)
        if unfinished is not None:
            return self._take_over(unfinished, row.next_version)
        return self._new(row)

    def _locked_policy(self, policy: str) -> Any:
        p = schema.policies.c
        # Two workers of PostgreSQL take turns; SQLite's BEGIN IMMEDIATE has seen to that. The weak kind of lock: the
        # proxy's new groups refer to this row.
        query = select(schema.policies).where(p.project == self._project, p.id == policy)
        query = query.with_for_update(key_share=True)
        return self._connection.execute(query).one_or_none()

    def _unfinished(self, policy: str) -> Any:
        s = schema.steps.c
        query = select(schema.steps).where(s.project == self._project, s.policy == policy, s.state.in_(UNFINISHED))
        return self._connection.execute(query).one_or_none()

    def _take_over(self, step: Any, next_version: int) -> Claim | None:
        """A step whose lease has ended begins again: the same trajectories and baselines, another version number."""
        if step.lease_until > self._now:
            return None
        v, s, m = schema.policy_versions.c, schema.steps.c, schema.step_trajectories.c
        if step.version_out is not None:
            self._connection.execute(
                schema.policy_versions.update()
                .where(v.project == self._project, v.policy == step.policy, v.version == step.version_out)
                .values(state="rejected", reason="its step was taken over by another worker", served=False)
            )
        self._count_up(step.policy, next_version=next_version + 1)
        # What the lost attempt noted is not this one's: it may leave other trajectories out.
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
        )
        self._connection.execute(
            schema.steps.update()
            .where(s.project == self._project, s.id == step.id)
            .values(
                state="claimed",
                version_out=None,
                attempt=claim.attempt,
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

    def _new(self, policy: Any) -> Claim | None:
        choice = choose(self._candidates(policy.id), self._lineage(policy), self._now, self._settings)
        for reason, group_ids in choice.discarded.items():
            discard(self._connection, self._project, group_ids, reason)
        if not choice.claimed:
            return None
        baselines = self._baselines(policy.id, choice)
        claim = Claim(
            project=self._project,
            policy=policy.id,
            number=policy.next_step,
            attempt=1,
            version_in=policy.live_version,
            version_out=policy.next_version,
            adapter_in=self._adapter(policy.id, policy.live_version),
            created_at=self._now,
            baselined=len(baselines),
        )
        self._count_up(policy.id, next_version=claim.version_out + 1, next_step=claim.number + 1)
        self._write(claim, choice, baselines)
        return claim

    def _write(self, claim: Claim, choice: Choice, baselines: Mapping[str, float]) -> None:
        """The step, what it takes, and that it has taken it."""
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
        self._connection.execute(
            schema.steps.insert().values(
                project=self._project,
                id=claim.id,
                policy=claim.policy,
                number=claim.number,
                state="claimed",
                version_in=claim.version_in,
                groups=len(choice.claimed),
                trajectories=len(taken),
                baselined=claim.baselined,
                config=self._settings.model_dump(mode="json"),
                attempt=claim.attempt,
                lease_until=self._lease_until,
                created_at=self._now,
            )
        )
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
        """What each single of the step is compared with, by id. From then on the running means know its reward."""
        singles = [member for group in choice.claimed if group.alone for member in group.members]
        known = self._means(policy, singles)
        compared = compare(singles, known)
        b = schema.baselines.c
        for (task, end_user), mean in compared.means.items():
            key = {"project": self._project, "policy": policy, "task": task, "end_user": end_user}
            values = {"mean": mean.mean, "count": mean.count, "updated_at": self._now}
            # The policy's row is locked: nobody else inserts it meanwhile.
            if (task, end_user) in known:
                is_it = [b[name] == value for name, value in key.items()]
                self._connection.execute(schema.baselines.update().where(*is_it).values(values))
            else:
                self._connection.execute(schema.baselines.insert().values(key | values))
        return compared.baselines

    def _means(self, policy: str, singles: Sequence[CandidateMember]) -> dict[Key, Mean]:
        """The running means of these trajectories' tasks and users, as far as there are any."""
        b = schema.baselines.c
        query = (
            select(b.task, b.end_user, b.mean, b.count)
            .where(b.project == self._project, b.policy == policy)
            .where(b.task.in_({single.task for single in singles}))
            .where(b.end_user.in_({"", *(single.end_user for single in singles)}))
        )
        return {(task, user): Mean(mean, count) for task, user, mean, count in self._connection.execute(query)}

    def _candidates(self, policy: str) -> list[Candidate]:
        """The scored groups with their rewarded members, the oldest first."""
        g, t = schema.groups.c, schema.trajectories.c
        scored = (g.project == self._project, g.policy == policy, g.state == "scored")
        # Who revises a reward, or adds a member, locks the group first, in the order of ids as here: from now on what
        # is read stays true until it is claimed.
        self._connection.execute(select(g.id).where(*scored).order_by(g.id).with_for_update(key_share=True))
        query = (
            select(
                g.id, g.closed_at, g.compared_with, t.id, t.reward, t.first_version, t.last_version, t.sampled_tokens
            )
            .add_columns(func.coalesce(t.task, ""), func.coalesce(t.end_user, ""))
            .join(schema.trajectories, and_(t.project == g.project, t.group_id == g.id))
            .where(*scored)
            .where(t.state == "rewarded", t.split == "train", t.no_train.is_(False), t.reward.is_not(None))
            .order_by(g.closed_at, g.id, t.id)
        )
        return Candidate.grouped(tuple(row) for row in self._connection.execute(query))

    def _lineage(self, policy: Any) -> list[int]:
        v = schema.policy_versions.c
        query = select(v.version, v.parent).where(v.project == self._project, v.policy == policy.id)
        parents = {row.version: row.parent for row in self._connection.execute(query)}
        return lineage_of(policy.live_version, parents)

    def _adapter(self, policy: str, version: int) -> Path | None:
        v = schema.policy_versions.c
        query = select(v.adapter_path).where(v.project == self._project, v.policy == policy, v.version == version)
        folder = self._connection.execute(query).scalar_one()
        return None if folder is None else Path(folder)

    def _count_up(self, policy: str, **numbers: int) -> None:
        p = schema.policies.c
        is_it = (p.project == self._project, p.id == policy)
        self._connection.execute(schema.policies.update().where(*is_it).values(**numbers))

    @property
    def _lease_until(self) -> datetime:
        return self._now + timedelta(seconds=self._settings.lease_s)
