"""Run the SQL for `/metrics` about what waits: trajectories, feedback, groups, judges, a step. Reads only.

Each query uses an index on unfinished rows, so its cost depends on what waits and not on the size of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Column, ColumnElement, Connection, Engine, func, literal, select, union_all

from migrations import schema
from whetstone.domain.states import UNFINISHED_GROUP_STATES, FeedbackState, GroupState, StepState, TrajectoryStatus

p, g, t, f = schema.policies.c, schema.groups.c, schema.trajectories.c, schema.feedback.c
s, j, d = schema.steps.c, schema.judgements.c, schema.judge_days.c

RECENTLY = timedelta(hours=1)
_WAITING = (GroupState.CLOSED, GroupState.SCORED)
"""States of groups that wait for a judge or a step."""


@dataclass(frozen=True, slots=True)
class JudgeTotals:
    """A judge's totals for a policy, over all days."""

    policy: str
    judge: str
    accepted: int
    refused: int
    failed: int
    tokens: int
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Queues:
    """What waits, in all projects."""

    policies: Sequence[tuple[str, str]]
    """Name and state of the policies that can be trained."""
    open_trajectories: int
    assembly_lag_s: float
    feedback_waiting: int
    groups: Mapping[tuple[str, str], tuple[int, float | None]]
    """Policy and state -> number of groups, and how long the oldest has waited; None while it is open or claimed."""
    for_judges: Mapping[str, int]
    judged: Sequence[JudgeTotals]
    judge_s: Sequence[tuple[str, float, float]]
    """Judge, mean and longest duration (seconds) of the last hour's judgements."""
    step_running_s: Mapping[str, float]
    step_silent_s: Mapping[str, float]


class QueueTables:
    """The queries of `/metrics` for some projects. May be used from any thread."""

    def __init__(self, engine: Engine, projects: Sequence[str]) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._projects = list(projects)

    def read(self, now: datetime) -> Queues:
        """Return what waits now."""
        with self._reader.connect() as connection:
            trained = (p.project.in_(self._projects), p.upstream.is_(None))
            policies = select(p.project, p.id, p.state).where(*trained).order_by(p.id)
            rows = [(row.project, row.id, row.state) for row in connection.execute(policies)]
            running, silent = self._step(connection, now)
            return Queues(
                policies=[(policy, state) for _, policy, state in rows],
                open_trajectories=self._open(connection),
                assembly_lag_s=self._lag_s(connection, now),
                feedback_waiting=self._waiting(connection),
                groups=self._groups(connection, [policy for _, policy, _ in rows], now),
                for_judges=self._for_judges(connection, [policy for _, policy, _ in rows]),
                judged=self._judged(connection),
                judge_s=self._judge_s(connection, [policy for _, policy, _ in rows], now),
                step_running_s={policy: running.get(policy, 0.0) for _, policy, _ in rows},
                step_silent_s={policy: silent.get(policy, 0.0) for _, policy, _ in rows},
            )

    def _open(self, connection: Connection) -> int:
        return int(connection.execute(select(func.count()).where(_is(t.state, TrajectoryStatus.OPEN))).scalar_one())

    def _lag_s(self, connection: Connection, now: datetime) -> float:
        """Return the age of the oldest row that no judging worker has looked at."""
        unplaced = select(func.min(t.created_at, type_=t.created_at.type).label("at")).where(t.placed_at.is_(None))
        fresh = select(func.min(f.created_at, type_=f.created_at.type)).where(
            _is(f.state, FeedbackState.WAITING), f.due_at.is_(None)
        )
        oldest = [row.at for row in connection.execute(union_all(unplaced, fresh)) if row.at is not None]
        return max(0.0, (now - min(oldest)).total_seconds()) if oldest else 0.0

    def _waiting(self, connection: Connection) -> int:
        postponed = select(func.count()).where(_is(f.state, FeedbackState.WAITING), f.due_at.is_not(None))
        return int(connection.execute(postponed).scalar_one())

    def _groups(
        self, connection: Connection, policies: Sequence[str], now: datetime
    ) -> dict[tuple[str, str], tuple[int, float | None]]:
        of_some = (g.project.in_(self._projects), g.policy.in_(policies), g.state.in_(UNFINISHED_GROUP_STATES))
        oldest = func.min(g.closed_at, type_=g.closed_at.type).label("oldest")
        query = select(g.policy, g.state, func.count().label("there"), oldest).where(*of_some)
        groups: dict[tuple[str, str], tuple[int, float | None]] = {
            (policy, state): (0, 0.0 if state in _WAITING else None)
            for policy in policies
            for state in UNFINISHED_GROUP_STATES
        }
        for row in connection.execute(query.group_by(g.policy, g.state)):
            waits = row.oldest is not None and row.state in _WAITING
            groups[row.policy, row.state] = (row.there, (now - row.oldest).total_seconds() if waits else None)
        return groups

    def _for_judges(self, connection: Connection, policies: Sequence[str]) -> dict[str, int]:
        """Filter by policy and state; otherwise all groups that ever existed would be read."""
        closed = (g.project.in_(self._projects), g.policy.in_(policies), g.state == GroupState.CLOSED)
        due = select(g.policy, func.count()).where(*closed, g.judge_due_at.is_not(None))
        return {policy: count for policy, count in connection.execute(due.group_by(g.policy))}  # noqa: C416

    def _judged(self, connection: Connection) -> list[JudgeTotals]:
        sums = [func.sum(column) for column in (d.calls, d.refused, d.failed, d.tokens, d.cost_usd)]
        query = select(d.policy, d.judge, *sums).where(d.project.in_(self._projects)).group_by(d.policy, d.judge)
        return [
            JudgeTotals(
                policy, judge, int(calls - refused - failed), int(refused), int(failed), int(tokens), float(cost)
            )
            for policy, judge, calls, refused, failed, tokens, cost in connection.execute(
                query.order_by(d.policy, d.judge)
            )
        ]

    def _judge_s(
        self, connection: Connection, policies: Sequence[str], now: datetime
    ) -> list[tuple[str, float, float]]:
        """Count only real calls: a cached answer took no time."""
        lately = (j.project.in_(self._projects), j.policy.in_(policies), j.accepted_at >= now - RECENTLY)
        query = select(j.judge, func.avg(j.seconds), func.max(j.seconds)).where(*lately, j.seconds.is_not(None))
        rows = connection.execute(query.where(j.cached_from.is_(None)).group_by(j.judge).order_by(j.judge))
        return [(judge, float(mean_s), float(most_s)) for judge, mean_s, most_s in rows]

    def _step(self, connection: Connection, now: datetime) -> tuple[dict[str, float], dict[str, float]]:
        """Return, by policy, how long a worker has had its step, and how long that worker has been silent."""
        under_way = (s.project.in_(self._projects), s.ended_at.is_(None), s.state != StepState.WAITING_GATE)
        query = select(s.policy, s.created_at, s.lease_until).where(*under_way)
        running, silent = {}, {}
        for policy, created_at, lease_until in connection.execute(query):
            running[policy] = (now - created_at).total_seconds()
            if lease_until is not None:
                silent[policy] = max(0.0, (now - lease_until).total_seconds())
        return running, silent


def _is(column: Column[str], value: str) -> ColumnElement[bool]:
    """Put the value into the statement itself: SQLite cannot match a parameter with a partial index."""
    return column == literal(value, literal_execute=True)
