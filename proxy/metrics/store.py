"""Run the SQL for `/metrics`: what waits (trajectories, feedback, groups, judges, a step), and the steps so far. Reads
only.

- What waits: each query uses an index on unfinished rows, so its cost depends on what waits and not on the size of the
  table.
- Steps: a scrape reads only those that have ended since the last one, as a policy's steps end in the order of their
  numbers and never change afterwards. The first scrape of a process reads them all.
"""

import copy
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Engine, Row, func, literal, select, union_all

from migrations import schema
from whetstone.domain.states import (
    TARGET_NEVER_CAME,
    UNFINISHED_GROUP_STATES,
    FeedbackState,
    GroupState,
    StepState,
    TrajectoryStatus,
)

p, g, t, f = schema.policies.c, schema.groups.c, schema.trajectories.c, schema.feedback.c
s, j, d = schema.steps.c, schema.judgements.c, schema.judge_days.c

RECENTLY = timedelta(hours=1)
A_DAY = timedelta(days=1)
_WAITING = (GroupState.CLOSED, GroupState.SCORED)
"""States of groups that wait for a judge or a step."""
FIGURES = (
    s.loss, s.reward_mean, s.advantage_spread, s.kl, s.entropy, s.masked_share, s.mismatch_k3, s.grad_norm,
    s.learning_rate, s.tokens_per_s, s.seconds, s.completions, s.rows, s.read_tokens, s.decided_share,
    s.support_disagreements, s.state_share, s.effective_share,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Queues:
    """What waits, in all projects."""

    policies: Sequence[tuple[str, str]]
    """Name and state of the policies that can be trained."""
    open_trajectories: int
    assembly_lag_s: float
    feedback_waiting: int
    feedback_without_target: int
    """Feedback of the last day whose target never came."""
    groups: Mapping[tuple[str, str], tuple[int, float | None]]
    """Policy and state -> number of groups, and how long the oldest has waited; None while it is open or claimed."""
    for_judges: Mapping[str, int]
    judged: Sequence[Row[Any]]
    """By `policy` and `judge`, over all days: `calls`, of which `refused` and `failed`, `tokens` and `cost_usd`."""
    judge_s: Sequence[tuple[str, float, float]]
    """Judge, mean and longest duration (seconds) of the last hour's judgements."""
    step_running_s: Mapping[str, float]
    step_silent_s: Mapping[str, float]


@dataclass
class PolicySteps:
    """A policy's steps up to and including step `number`."""

    policy: str
    live_version: int = 0
    handover_share: float | None = None
    """None without a handover."""
    number: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """State -> number of steps that ended in it."""
    sampled_tokens: int = 0
    """Tokens trained on in all of them."""
    discarded: Counter[str] = field(default_factory=Counter)
    """Reason -> groups that were discarded when they were claimed."""
    last: Mapping[str, float | None] = field(default_factory=dict)
    """Column -> figure of the last ended step, for all of `FIGURES`; empty before the first."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds, of the last ended step."""


class MetricTables:
    """The queries of `/metrics` for some projects. May be used from any thread."""

    def __init__(self, engine: Engine, projects: Sequence[str]) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._projects = list(projects)
        self._counted: dict[tuple[str, str], PolicySteps] = {}
        self._counting = threading.Lock()

    def queues(self, now: datetime) -> Queues:
        """Return what waits now."""
        with self._reader.connect() as connection:
            trained = (p.project.in_(self._projects), p.upstream.is_(None))
            states = connection.execute(select(p.id, p.state).where(*trained).order_by(p.id)).all()
            policies = [policy for policy, _ in states]
            running, silent = self._running_steps(connection, now)
            return Queues(
                policies=[(policy, state) for policy, state in states],
                open_trajectories=_count(connection, _is(t.state, TrajectoryStatus.OPEN)),
                assembly_lag_s=_lag_s(connection, now),
                feedback_waiting=_count(connection, _is(f.state, FeedbackState.WAITING), f.due_at.is_not(None)),
                feedback_without_target=_count(
                    connection,
                    _is(f.state, FeedbackState.FAILED),
                    f.project.in_(self._projects),
                    f.created_at >= now - A_DAY,
                    f.reason.in_(TARGET_NEVER_CAME),
                ),
                groups=self._groups(connection, policies, now),
                for_judges=self._for_judges(connection, policies),
                judged=self._judged(connection),
                judge_s=self._judge_s(connection, policies, now),
                step_running_s={policy: running.get(policy, 0.0) for policy in policies},
                step_silent_s={policy: silent.get(policy, 0.0) for policy in policies},
            )

    def steps(self) -> list[PolicySteps]:
        """Return the steps of each policy that can be trained: a copy, ordered by project and name."""
        steps = []
        with self._counting, self._reader.connect() as connection:
            for project in self._projects:
                trained = select(p.id, p.live_version, p.handover_share).where(
                    p.project == project, p.upstream.is_(None)
                )
                for policy, live_version, handover_share in connection.execute(trained.order_by(p.id)).all():
                    so_far = self._counted.setdefault((project, policy), PolicySteps(policy))
                    so_far.live_version, so_far.handover_share = live_version, handover_share
                    _count_steps(connection, project, so_far)
                    steps.append(copy.deepcopy(so_far))
        return steps

    def _groups(
        self, connection: Connection, policies: Sequence[str], now: datetime
    ) -> dict[tuple[str, str], tuple[int, float | None]]:
        of_some = (g.project.in_(self._projects), g.policy.in_(policies), g.state.in_(UNFINISHED_GROUP_STATES))
        oldest = func.min(g.closed_at, type_=g.closed_at.type).label("oldest")
        query = select(g.policy, g.state, func.count().label("there"), oldest).where(*of_some)
        none: dict[tuple[str, str], tuple[int, float | None]] = {
            (policy, state): (0, 0.0 if state in _WAITING else None)
            for policy in policies
            for state in UNFINISHED_GROUP_STATES
        }
        return none | {
            (row.policy, row.state): (
                row.there,
                (now - row.oldest).total_seconds() if row.oldest is not None and row.state in _WAITING else None,
            )
            for row in connection.execute(query.group_by(g.policy, g.state))
        }

    def _for_judges(self, connection: Connection, policies: Sequence[str]) -> dict[str, int]:
        """Filter by policy and state; otherwise all groups that ever existed would be read."""
        closed = (g.project.in_(self._projects), g.policy.in_(policies), g.state == GroupState.CLOSED)
        due = select(g.policy, func.count()).where(*closed, g.judge_due_at.is_not(None))
        return {policy: count for policy, count in connection.execute(due.group_by(g.policy))}  # noqa: C416

    def _judged(self, connection: Connection) -> Sequence[Row[Any]]:
        sums = [func.sum(column).label(column.name) for column in (d.calls, d.refused, d.failed, d.tokens, d.cost_usd)]
        query = select(d.policy, d.judge, *sums).where(d.project.in_(self._projects)).group_by(d.policy, d.judge)
        return connection.execute(query.order_by(d.policy, d.judge)).all()

    def _judge_s(
        self, connection: Connection, policies: Sequence[str], now: datetime
    ) -> list[tuple[str, float, float]]:
        """Count only real calls: a cached answer took no time."""
        lately = (j.project.in_(self._projects), j.policy.in_(policies), j.accepted_at >= now - RECENTLY)
        query = select(j.judge, func.avg(j.seconds), func.max(j.seconds)).where(*lately, j.seconds.is_not(None))
        rows = connection.execute(query.where(j.cached_from.is_(None)).group_by(j.judge).order_by(j.judge))
        return [(judge, float(mean_s), float(most_s)) for judge, mean_s, most_s in rows]

    def _running_steps(self, connection: Connection, now: datetime) -> tuple[dict[str, float], dict[str, float]]:
        """Return, by policy, how long a worker has had its step, and how long that worker has been silent."""
        under_way = (s.project.in_(self._projects), s.ended_at.is_(None), s.state != StepState.WAITING_GATE)
        rows = connection.execute(select(s.policy, s.created_at, s.lease_until).where(*under_way)).all()
        running = {row.policy: (now - row.created_at).total_seconds() for row in rows}
        leased = [row for row in rows if row.lease_until is not None]
        return running, {row.policy: max(0.0, (now - row.lease_until).total_seconds()) for row in leased}


def _count(connection: Connection, *conditions: ColumnElement[bool]) -> int:
    return connection.execute(select(func.count()).where(*conditions)).scalar_one()


def _lag_s(connection: Connection, now: datetime) -> float:
    """Return the age of the oldest row that no judging worker has looked at."""
    unplaced = select(func.min(t.created_at, type_=t.created_at.type).label("at")).where(t.placed_at.is_(None))
    fresh = select(func.min(f.created_at, type_=f.created_at.type)).where(
        _is(f.state, FeedbackState.WAITING), f.due_at.is_(None)
    )
    oldest = [row.at for row in connection.execute(union_all(unplaced, fresh)) if row.at is not None]
    return max(0.0, (now - min(oldest)).total_seconds()) if oldest else 0.0


def _count_steps(connection: Connection, project: str, so_far: PolicySteps) -> None:
    """Count the steps that have ended since."""
    before = so_far.number
    of_policy = (s.project == project, s.policy == so_far.policy)
    ended = (
        select(s.number, s.state, s.ended_at, s.sampled_tokens, s.discarded)
        .where(*of_policy, s.number > before)
        .order_by(s.number)
    )
    for row in connection.execute(ended):
        if row.ended_at is None:
            break
        so_far.number = row.number
        so_far.ended[row.state] += 1
        so_far.sampled_tokens += row.sampled_tokens or 0
        so_far.discarded.update(row.discarded or {})
    if so_far.number > before:
        last = connection.execute(select(*FIGURES, s.phases).where(*of_policy, s.number == so_far.number)).one()
        so_far.last = {column.name: last._mapping[column.name] for column in FIGURES}
        so_far.phases = last.phases or {}


def _is(column: Column[str], value: str) -> ColumnElement[bool]:
    """Put the value into the statement itself: SQLite cannot match a parameter with a partial index."""
    return column == literal(value, literal_execute=True)
