"""The proxy's SQL for feedback, policies and the states of trajectories and groups.

Calls, turns and retries are in `call_store`, `turn_store` and `retry_store`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    Select,
    Table,
    and_,
    bindparam,
    event,
    func,
    or_,
    select,
    text,
)

from migrations import schema
from proxy.domain.feedback_rows import FeedbackReceipt
from proxy.domain.policies import Canary, Handover, Policy
from proxy.recording.call_store import CallRows, erased_feedback
from proxy.recording.reason_store import TRAJECTORY, WHY_NOT_TRAINED
from whetstone.database.bulk import present
from whetstone.database.change_detector import Changes
from whetstone.database.engine import Transactions, insert_all_new, insert_new, of_one_writer
from whetstone.database.types import Json, Utc, storable
from whetstone.domain.states import FeedbackState, GroupState, TrajectoryStatus, VersionState
from whetstone.registry.completion_store import completions_named

REVIEWS_AT_ONCE = 20

REVIEWS = text(f"""
    SELECT r.trajectory_id, r.group_id, r.policy, r.task, r.reward, r.reward_source, r.review_at,
           (SELECT v.messages FROM admin_conversations AS v
            WHERE v.project = r.project AND v.completion_id = c.id) AS messages, c.response
    FROM admin_reviews AS r
    JOIN trajectories AS t ON t.project = r.project AND t.id = r.trajectory_id
    JOIN completions AS c ON c.project = t.project AND c.id = t.tail_completion_id
    WHERE r.project = :project
    ORDER BY r.review_at, r.trajectory_id
    LIMIT {REVIEWS_AT_ONCE}
""").columns(messages=Json, response=Json, review_at=Utc)

c, f, g, t = schema.completions.c, schema.feedback.c, schema.groups.c, schema.trajectories.c
p, v = schema.policies.c, schema.policy_versions.c
# Built once: it runs several times a second.
_POLICIES = (
    select(p.id, p.live_version, p.created_at, p.aliases, p.upstream, p.base_model)
    .add_columns(p.handover_teacher, p.handover_share)
    .add_columns(v.version, v.state, v.canary_share)
    .join(schema.policy_versions, and_(v.project == p.project, v.policy == p.id, v.served), isouter=True)
    .where(p.project == bindparam("its_project"))
    .order_by(p.id, v.version)
)

log = logging.getLogger(__name__)


class Store:
    """The tables, through one engine. Writes from one thread, reads from any."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.writing = of_one_writer(engine)
        """Engine of the writer's thread."""
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.calls = CallRows()
        """Writes calls."""
        self.transactions = Transactions(self.writing)
        """Transactions of the writer's thread."""
        self.changes = Changes(engine, self.transactions)
        """Detects whether there is anything new to read."""

    def policies(self, project: str) -> list[Policy]:
        """Return the project's policies with the versions that vLLM keeps loaded, sorted by name."""
        return list(self.changes.unless(("policies", project), lambda: self._policies(project)))

    def _policies(self, project: str) -> list[Policy]:
        rows = self._read(_POLICIES, its_project=project)
        return [_policy(list(of_policy)) for _, of_policy in groupby(rows, key=lambda row: row.id)]

    def reply(self, project: str, turn_key: str) -> bytes | None:
        """Return the answer that was sent under this key; None if none was finished."""
        finished = (c.project == project, c.turn_key == turn_key, c.turn_key.is_not(None), c.reply.is_not(None))
        rows = self._read(select(c.reply).where(*finished).limit(1))
        return rows[0].reply if rows else None

    def insert_feedback(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> list[FeedbackReceipt]:
        """Add feedback as it arrived, state `waiting`. Feedback that exists already, by id or by key, is not changed.
        Feedback on a trajectory whose deletion was requested after it arrived is skipped."""
        gone = erased_feedback(connection, rows)
        remaining = [row for row in rows if row["id"] not in gone]
        keyless = [
            {**storable(row), "state": FeedbackState.WAITING} for row in remaining if row["idempotency_key"] is None
        ]
        if keyless:
            insert_all_new(connection, schema.feedback, keyless)
        receipts = []
        for row in rows:
            row_id, key, new = row["id"], row["idempotency_key"], row["id"] not in gone
            if not new:
                log.info("feedback %s is left out: its trajectory was deleted since", row_id)
            elif key is not None:
                stored = {**storable(row), "state": FeedbackState.WAITING}
                new = insert_new(connection, schema.feedback, stored)
                if not new:
                    earlier = select(f.id).where(f.project == row["project"], f.idempotency_key == key)
                    row_id = connection.execute(earlier).scalar_one()
            receipts.append(FeedbackReceipt(row_id, new))
        return receipts

    def targets(self, project: str, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return the trajectory or group that each row of feedback is about; None where the project has none (yet).

        What another project has takes the same statements as what does not exist.
        """
        trajectory_ids = sorted({row["target_id"] for row in rows if row["target_kind"] == "trajectory"})
        group_ids = sorted({row["target_id"] for row in rows if row["target_kind"] == "group"})
        names = {(row["target_id"], row["choice"]) for row in rows if row["target_kind"] == "completion"}
        with self._reader.connect() as connection:
            trajectories = present(connection, schema.trajectories, project, trajectory_ids) if trajectory_ids else []
            groups = present(connection, schema.groups, project, group_ids) if group_ids else []
            completions = completions_named(connection, project, names)
        by_name = {name: trajectory_id for name, (_, trajectory_id) in completions.items()}
        by_id = {("trajectory", one): one for _, one in trajectories} | {("group", one): one for _, one in groups}
        return [
            by_name.get((row["target_id"], row["choice"]))
            if row["target_kind"] == "completion"
            else by_id.get((row["target_kind"], row["target_id"]))
            for row in rows
        ]

    def withdraw_feedback(self, connection: Connection, project: str, feedback_id: str, now: datetime) -> None:
        """Note that an app withdraws feedback, unless a step has claimed its target. Feedback in a final state is not
        changed."""
        its_trajectory = (
            t.project == f.project,
            t.id == f.trajectory_id,
            t.state.in_((TrajectoryStatus.CLAIMED, TrajectoryStatus.TRAINED)),
        )
        its_group = (g.project == f.project, g.id == f.target_id, g.state.in_((GroupState.CLAIMED, GroupState.TRAINED)))
        connection.execute(
            schema.feedback.update()
            .where(f.project == project, f.id == feedback_id, f.withdrawn_at.is_(None))
            .where(f.state.in_((FeedbackState.WAITING, FeedbackState.APPLIED, FeedbackState.SUPERSEDED)))
            .where(~select(t.id).where(*its_trajectory).exists())
            .where(or_(f.target_kind != "group", f.applied_at.is_(None), ~select(g.id).where(*its_group).exists()))
            .values(withdrawn_at=now)
        )

    def feedback(self, project: str, feedback_id: str) -> dict[str, Any] | None:
        """Return one feedback in its current state; None if the project has none with this id.

        For applied feedback, `why_not_trained` is what its trajectory still waits for.
        """
        row = self._row(schema.feedback, project, feedback_id)
        if row is not None:
            applied = row["state"] == FeedbackState.APPLIED and row["trajectory_id"] is not None
            trajectory = self.trajectory(project, row["trajectory_id"]) if applied else None
            row["why_not_trained"] = trajectory and trajectory["why_not_trained"]
        return row

    def trajectory(self, project: str, trajectory_id: str) -> dict[str, Any] | None:
        """Return one trajectory in its current state; None if it does not exist."""
        return self._one(TRAJECTORY.where(t.project == project, t.id == trajectory_id))

    def group(self, project: str, group_id: str) -> dict[str, Any] | None:
        """Return one group in its current state; None if it does not exist."""
        return self._row(schema.groups, project, group_id)

    def group_members(self, project: str, group_id: str) -> list[dict[str, Any]]:
        """Return its trajectories: id, state, reward, why_not_trained."""
        members = select(t.id, t.state, t.reward, WHY_NOT_TRAINED).where(t.project == project, t.group_id == group_id)
        return [dict(row._mapping) for row in self._read(members.order_by(t.created_at, t.id))]

    def reviews(self, project: str) -> list[dict[str, Any]]:
        """Return the attempts that wait for a human review, the longest waiting first: the attempt, its score, its
        conversation."""
        return [dict(row._mapping) for row in self._read(REVIEWS, project=project)]

    def reasons(self, projects: Sequence[str], since: datetime) -> dict[tuple[str, str], int]:
        """Return the number of trajectories that began since `since`, by policy and reason ("" once trained on). A name
        after a reason is cut off."""
        begun = select(t.policy, WHY_NOT_TRAINED).where(t.project.in_(projects), t.created_at >= since).subquery().c
        query = select(begun.policy, begun.why_not_trained, func.count()).group_by(begun.policy, begun.why_not_trained)
        counts: Counter[tuple[str, str]] = Counter()
        for policy, reason, count in self._read(query):
            counts[policy, (reason or "").partition(":")[0]] += count
        return counts

    def probe_tokens(self, projects: Sequence[str]) -> int:
        """Return the number of tokens sampled so far to probe versions and to check that vLLM is alive."""
        rows = self._read(select(func.sum(v.probe_tokens)).where(v.project.in_(projects)))
        return int(rows[0][0] or 0)

    def sync_commits(self) -> None:
        """Make a commit return only when it is on the disk. PostgreSQL does this by default; SQLite would sync
        later."""
        if self.engine.dialect.name == "sqlite":
            for engine in (self.engine, self.writing):
                event.listen(engine, "connect", lambda one, _: one.execute("PRAGMA synchronous=FULL").close())
                engine.dispose()

    def close(self) -> None:
        """Close every connection."""
        self.changes.close()
        self.writing.dispose()
        self.engine.dispose()

    def _row(self, table: Table, project: str, row_id: str) -> dict[str, Any] | None:
        return self._one(select(table).where(table.c.project == project, table.c.id == row_id))

    def _one(self, query: Select[Any]) -> dict[str, Any] | None:
        rows = self._read(query)
        return dict(rows[0]._mapping) if rows else None

    def _read(self, query: Executable, **parameters: Any) -> Sequence[Any]:
        with self._reader.connect() as connection:
            return connection.execute(query, parameters).all()


def _policy(rows: list[Any]) -> Policy:
    """Build a policy from its rows, one for each served version."""
    first = rows[0]
    tried = [row for row in rows if row.state == VersionState.CANDIDATE and row.canary_share is not None]
    return Policy(
        name=first.id,
        live_version=first.live_version,
        served_versions=frozenset(row.version for row in rows if row.version is not None),
        created_at_s=int(first.created_at.timestamp()),
        aliases=tuple(first.aliases or ()),
        upstream=first.upstream,
        upstream_model=first.base_model if first.upstream else None,
        pinnable_versions=frozenset(
            row.version for row in rows if row.state in (VersionState.LIVE, VersionState.RETIRED)
        ),
        canary=Canary(tried[-1].version, tried[-1].canary_share) if tried else None,
        handover=(
            None if first.handover_teacher is None else Handover(first.id, first.handover_teacher, first.handover_share)
        ),
    )
