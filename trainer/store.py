"""The trainer's SQL: claim a step, read what was spoken, move states forward. No other file of it knows the tables.

Every write of a step carries the claim's attempt number (a fencing token): a worker whose lease was taken over writes
nothing more.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Select, and_, case, func, or_, select

from migrations import schema
from trainer.claims import Candidate, Claim, Member, Probe, choose, lineage_of
from trainer.errors import LeaseLost
from trainer.rows import Spoken
from whetstone.settings import TrainerSettings
from whetstone.store import served

UNFINISHED = ("claimed", "trained", "loaded")


class Store:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project

    def served(self) -> dict[str, Path]:
        """The adapters that vLLM is to have loaded: name and folder."""
        with self._reader.connect() as connection:
            return served(connection, self._project)

    def policies(self) -> set[str]:
        """The project's policies."""
        with self._reader.connect() as connection:
            p = schema.policies.c
            return set(connection.execute(select(p.id).where(p.project == self._project)).scalars())

    def claim(self, policy: str, settings: TrainerSettings) -> Claim | None:
        """Take the policy's next step: one whose worker went silent, else a new one if one is due.

        Groups that have become too stale are discarded on the way.
        """
        now = datetime.now(UTC)
        with self._engine.begin() as connection:
            row = self._locked_policy(connection, policy)
            if row is None or row.state != "training":
                return None
            unfinished = self._unfinished(connection, policy)
            if unfinished is not None:
                return self._take_over(connection, unfinished, row.next_version, now, settings)
            return self._new(connection, row, now, settings)

    def members(self, claim: Claim) -> list[Member]:
        """What the step's trajectories said, with whole prompts, in a fixed order."""
        s = schema.step_trajectories.c
        query = (
            select(s.trajectory_id, s.group_id, s.reward)
            .where(s.project == claim.project, s.step_id == claim.id)
            .order_by(s.group_id, s.trajectory_id)
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
            return [
                Member(row.trajectory_id, row.group_id, row.reward, self._spoken(connection, claim, row.trajectory_id))
                for row in rows
            ]

    def renew(self, claim: Claim, lease_s: float) -> None:
        """Keep the step for `lease_s` more seconds.

        Raises:
            LeaseLost: another worker has it.
        """
        with self._engine.begin() as connection:
            self._update_step(connection, claim, lease_until=datetime.now(UTC) + timedelta(seconds=lease_s))

    def trained(self, claim: Claim, figures: dict[str, Any], folder: Path, manifest_sha256: str) -> None:
        """The adapter is on disk: its version becomes the candidate.

        Raises:
            LeaseLost: another worker has the step.
        """
        version = {
            "project": claim.project,
            "id": claim.name_out,
            "policy": claim.policy,
            "version": claim.version_out,
            "parent": claim.version_in,
            "state": "candidate",
            "step": claim.number,
            "adapter_path": str(folder),
            "manifest_sha256": manifest_sha256,
            "served": True,
            "created_at": datetime.now(UTC),
        }
        with self._engine.begin() as connection:
            self._update_step(connection, claim, state="trained", version_out=claim.version_out, **figures)
            connection.execute(schema.policy_versions.insert().values(**version))

    def loaded(self, claim: Claim) -> None:
        """vLLM has the candidate.

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            self._update_step(connection, claim, state="loaded")

    def promote(self, claim: Claim, figures: dict[str, Any], probe: Probe, keep_served: int) -> None:
        """The candidate becomes the live version, in one transaction with all that follows from it.

        Raises:
            LeaseLost: another worker has the step.
        """
        now = datetime.now(UTC)
        p, v = schema.policies.c, schema.policy_versions.c
        of_policy = and_(v.project == claim.project, v.policy == claim.policy)
        with self._engine.begin() as connection:
            self._end_step(connection, claim, "promoted", now, figures)
            update = schema.policy_versions.update()
            connection.execute(update.where(of_policy, v.state == "live").values(state="retired"))
            connection.execute(
                update.where(of_policy, v.version == claim.version_out).values(
                    state="live", promoted_at=now, probe_k3=probe.k3, probe_tokens=probe.tokens
                )
            )
            retired = (
                select(v.version)
                .where(of_policy, v.state == "retired", v.served, v.version > 0)
                .order_by(v.promoted_at.desc())
                .offset(keep_served)
            )
            old = list(connection.execute(retired).scalars())
            connection.execute(update.where(of_policy, v.version.in_(old)).values(served=False))
            connection.execute(
                schema.policies.update()
                .where(p.project == claim.project, p.id == claim.policy)
                .values(live_version=claim.version_out)
            )

    def reject(self, claim: Claim, reason: str, probe: Probe) -> None:
        """The candidate is not good enough. What it was trained on counts as trained: once is once.

        Raises:
            LeaseLost: another worker has the step.
        """
        v = schema.policy_versions.c
        with self._engine.begin() as connection:
            self._end_step(connection, claim, "rejected", datetime.now(UTC), {"error": reason})
            connection.execute(
                schema.policy_versions.update()
                .where(v.project == claim.project, v.policy == claim.policy, v.version == claim.version_out)
                .values(state="rejected", reason=reason, served=False, probe_k3=probe.k3, probe_tokens=probe.tokens)
            )

    def end_without_version(self, claim: Claim, state: str, reason: str) -> None:
        """The step made nothing: `noop` (nothing to learn) or `failed` (it could not).

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            self._end_step(connection, claim, state, datetime.now(UTC), {"error": reason})

    def note_advantages(self, claim: Claim, by_trajectory: dict[str, float], left_out: dict[str, str]) -> None:
        """Write down what each trajectory teaches, or why it teaches nothing (`left_out`: id -> reason).

        Raises:
            LeaseLost: another worker has the step.
        """
        s, t = schema.step_trajectories.c, schema.trajectories.c
        with self._engine.begin() as connection:
            self._update_step(connection, claim)
            for trajectory_id, advantage in by_trajectory.items():
                connection.execute(
                    schema.step_trajectories.update()
                    .where(s.project == claim.project, s.step_id == claim.id, s.trajectory_id == trajectory_id)
                    .values(advantage=advantage)
                )
            for trajectory_id, reason in left_out.items():
                connection.execute(
                    schema.trajectories.update()
                    .where(t.project == claim.project, t.id == trajectory_id)
                    .values(why_not_trained=reason)
                )

    # The steps of a claim.

    def _locked_policy(self, connection: Connection, policy: str) -> Any:
        p = schema.policies.c
        # FOR UPDATE lets two workers of PostgreSQL take turns; SQLite's BEGIN IMMEDIATE has done so already.
        query = select(schema.policies).where(p.project == self._project, p.id == policy).with_for_update()
        return connection.execute(query).one_or_none()

    def _unfinished(self, connection: Connection, policy: str) -> Any:
        s = schema.steps.c
        query = select(schema.steps).where(s.project == self._project, s.policy == policy, s.state.in_(UNFINISHED))
        return connection.execute(query).one_or_none()

    def _take_over(
        self, connection: Connection, step: Any, next_version: int, now: datetime, settings: TrainerSettings
    ) -> Claim | None:
        """A step whose lease has ended begins again, with the same trajectories and another version number."""
        if step.lease_until > now:
            return None
        v, s, m = schema.policy_versions.c, schema.steps.c, schema.step_trajectories.c
        if step.version_out is not None:
            connection.execute(
                schema.policy_versions.update()
                .where(v.project == self._project, v.policy == step.policy, v.version == step.version_out)
                .values(state="rejected", reason="its step was taken over by another worker", served=False)
            )
        self._count_up(connection, step.policy, next_version=next_version + 1)
        # What the lost attempt noted is not this one's: it may leave other trajectories out.
        connection.execute(
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
            adapter_in=self._adapter(connection, step.policy, step.version_in),
            created_at=step.created_at,
        )
        connection.execute(
            schema.steps.update()
            .where(s.project == self._project, s.id == step.id)
            .values(
                state="claimed",
                version_out=None,
                attempt=claim.attempt,
                lease_until=now + timedelta(seconds=settings.lease_s),
            )
        )
        if claim.attempt > settings.max_attempts:
            why = f"given up after {settings.max_attempts} attempts; the log of the training worker says why they ended"
            self._end_step(connection, claim, "failed", now, {"error": why})
            return None
        return claim

    def _new(self, connection: Connection, policy: Any, now: datetime, settings: TrainerSettings) -> Claim | None:
        candidates = self._candidates(connection, policy.id)
        choice = choose(candidates, self._lineage(connection, policy), now, settings)
        for reason, group_ids in choice.discarded.items():
            self._discard(connection, group_ids, reason)
        if not choice.claimed:
            return None
        number = policy.next_step
        claim = Claim(
            project=self._project,
            policy=policy.id,
            number=number,
            attempt=1,
            version_in=policy.live_version,
            version_out=policy.next_version,
            adapter_in=self._adapter(connection, policy.id, policy.live_version),
            created_at=now,
        )
        self._count_up(connection, policy.id, next_version=policy.next_version + 1, next_step=number + 1)
        members = [member for group in choice.claimed for member in group.members]
        connection.execute(
            schema.steps.insert().values(
                project=self._project,
                id=claim.id,
                policy=policy.id,
                number=number,
                state="claimed",
                version_in=claim.version_in,
                groups=len(choice.claimed),
                trajectories=len(members),
                config=settings.model_dump(mode="json"),
                attempt=1,
                lease_until=now + timedelta(seconds=settings.lease_s),
                created_at=now,
            )
        )
        connection.execute(
            schema.step_trajectories.insert(),
            [
                {
                    "project": self._project,
                    "step_id": claim.id,
                    "trajectory_id": member.trajectory_id,
                    "policy": policy.id,
                    "group_id": group.group_id,
                    "reward": member.reward,
                    "staleness": choice.staleness[member.first_version],
                }
                for group in choice.claimed
                for member in group.members
            ],
        )
        g, t = schema.groups.c, schema.trajectories.c
        connection.execute(
            schema.groups.update()
            .where(g.project == self._project, g.id.in_([group.group_id for group in choice.claimed]))
            .values(state="claimed", step=number)
        )
        connection.execute(
            schema.trajectories.update()
            .where(t.project == self._project, t.id.in_([member.trajectory_id for member in members]))
            .values(state="claimed", why_not_trained=None)
        )
        return claim

    def _candidates(self, connection: Connection, policy: str) -> list[Candidate]:
        """The scored groups with their rewarded members, the oldest first."""
        g, t = schema.groups.c, schema.trajectories.c
        query = (
            select(g.id, g.closed_at, t.id, t.reward, t.first_version, t.last_version, t.sampled_tokens)
            .join(schema.trajectories, and_(t.project == g.project, t.group_id == g.id))
            .where(g.project == self._project, g.policy == policy, g.state == "scored")
            .where(t.state == "rewarded", t.split == "train", t.no_train.is_(False), t.reward.is_not(None))
            .order_by(g.closed_at, g.id, t.id)
        )
        return Candidate.grouped(tuple(row) for row in connection.execute(query))

    def _lineage(self, connection: Connection, policy: Any) -> list[int]:
        v = schema.policy_versions.c
        query = select(v.version, v.parent).where(v.project == self._project, v.policy == policy.id)
        parents = {row.version: row.parent for row in connection.execute(query)}
        return lineage_of(policy.live_version, parents)

    def _adapter(self, connection: Connection, policy: str, version: int) -> Path | None:
        v = schema.policy_versions.c
        query = select(v.adapter_path).where(v.project == self._project, v.policy == policy, v.version == version)
        folder = connection.execute(query).scalar_one()
        return None if folder is None else Path(folder)

    def _count_up(self, connection: Connection, policy: str, **numbers: int) -> None:
        p = schema.policies.c
        connection.execute(schema.policies.update().where(p.project == self._project, p.id == policy).values(**numbers))

    def _discard(self, connection: Connection, group_ids: Sequence[str], reason: str) -> None:
        t = schema.trajectories.c
        members = select(t.id).where(t.project == self._project, t.group_id.in_(group_ids), t.state == "rewarded")
        self._close_books(connection, group_ids, members, reason=reason)

    # A step's life.

    def _update_step(self, connection: Connection, claim: Claim, **values: Any) -> None:
        s = schema.steps.c
        ours = and_(s.project == claim.project, s.id == claim.id, s.attempt == claim.attempt, s.state.in_(UNFINISHED))
        changed = connection.execute(schema.steps.update().where(ours).values(**(values or {"attempt": claim.attempt})))
        if not changed.rowcount:
            raise LeaseLost(f"step {claim.id} belongs to another worker")

    def _end_step(
        self, connection: Connection, claim: Claim, state: str, now: datetime, figures: dict[str, Any]
    ) -> None:
        """The step is over, and with it its groups, trajectories and feedback."""
        self._update_step(connection, claim, state=state, ended_at=now, lease_until=None, **figures)
        s = schema.step_trajectories.c
        members = and_(s.project == claim.project, s.step_id == claim.id)
        if state in ("promoted", "rejected"):
            taught = and_(members, s.advantage.is_not(None))
            groups, trajectories = select(s.group_id).where(taught), select(s.trajectory_id).where(taught)
            self._close_books(connection, groups, trajectories, step=claim.number)
            members = and_(members, s.advantage.is_(None))
        default = "step_failed" if state == "failed" else "group_uniform"
        t = schema.trajectories.alias()
        why = func.coalesce(t.c.why_not_trained, default)
        joined = and_(members, t.c.project == s.project, t.c.id == s.trajectory_id)
        reasons = connection.execute(select(why).where(joined).distinct()).scalars()
        # A group goes by the first reason; the step's own comes before those of single trajectories.
        for reason in sorted(reasons, key=lambda reason: (reason != default, reason)):
            of_reason = and_(joined, why == reason)
            groups, trajectories = select(s.group_id).where(of_reason), select(s.trajectory_id).where(of_reason)
            self._close_books(connection, groups, trajectories, reason=reason)

    def _close_books(
        self,
        connection: Connection,
        groups: Sequence[str] | Select[tuple[str]],
        trajectories: Select[tuple[str]],
        *,
        step: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Give groups, trajectories and their feedback their last state: trained in `step`, or not, for `reason`.

        A trajectory that has a reason of its own keeps it. A group is closed with the first of its members: those
        that taught come before those that did not.
        """
        g, t, f = schema.groups.c, schema.trajectories.c, schema.feedback.c
        # Feedback first, then groups: the judging worker locks groups before trajectories, and so do we.
        of_group = and_(f.target_kind == "group", f.target_id.in_(groups))
        connection.execute(
            schema.feedback.update()
            .where(f.project == self._project, f.state == "applied", or_(f.trajectory_id.in_(trajectories), of_group))
            .values(state="used" if step else "unused", reason=reason, step=step)
        )
        connection.execute(
            schema.groups.update()
            .where(g.project == self._project, g.state.in_(("scored", "claimed")), g.id.in_(groups))
            .values(state="trained" if step else "discarded", reason=reason)
        )
        connection.execute(
            schema.trajectories.update()
            .where(t.project == self._project, t.id.in_(trajectories))
            .values(
                state="trained" if step else "excluded",
                trained_in_step=step,
                why_not_trained=reason
                and case((t.state == "rewarded", reason), else_=func.coalesce(t.why_not_trained, reason)),
            )
        )

    def _spoken(self, connection: Connection, claim: Claim, trajectory_id: str) -> tuple[Spoken, ...]:
        c = schema.completions.c
        columns = (c.id, c.follows, c.policy, c.policy_version, c.prompt_token_ids, c.token_ids)
        query = (
            select(*columns, c.inference_logprobs, c.sampling, c.why_not_trained)
            .where(c.project == claim.project, c.trajectory_id == trajectory_id)
            .order_by(c.turn)
        )
        whole: dict[str, tuple[int, ...]] = {}
        spoken = []
        for row in connection.execute(query):
            if row.prompt_token_ids is None or row.token_ids is None:
                continue
            prompt_ids = (*whole.get(row.follows, ()), *row.prompt_token_ids)
            whole[row.id] = (*prompt_ids, *row.token_ids)
            if row.why_not_trained is None and row.policy == claim.policy:
                temperature = (row.sampling or {}).get("temperature")
                spoken.append(
                    Spoken(
                        completion_id=row.id,
                        prompt_ids=prompt_ids,
                        token_ids=tuple(row.token_ids),
                        logprobs=tuple(row.inference_logprobs),
                        version=row.policy_version,
                        temperature=1.0 if temperature is None else float(temperature),
                    )
                )
        return tuple(spoken)
