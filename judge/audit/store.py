"""The SQL of `judge.audit.__main__`: read stored judgements, references and costs. Reads only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, Select, Table, cast, func, literal, select, text

from judge.audit.hacking_signs import DriftDay, RankedGroup
from judge.decisions.feedback import rewards_from_feedback
from judge.decisions.model import Feedback, Trajectory
from judge.store.unit_of_work import IS_ATTEMPT, STANDING, columns_of, rows_of
from migrations import schema
from migrations.words import response_text
from whetstone.domain.why_not_trained import WhyNotTrained

f, g, t, c = schema.feedback.c, schema.groups.c, schema.trajectories.c, schema.completions.c
j, d, p = schema.judgements.c, schema.judge_days.c, schema.policies.c

BY_APPS = ("reward", "thumbs", "parts")
"""Sources of feedback that do not come from the judges."""
_DRIFT = text(
    "SELECT policy, day, pairs, agreement, difference FROM admin_judge_drift WHERE project = :project "
    "ORDER BY policy, day"
)
_HAS_TEXT = (t.completions > 0) & IS_ATTEMPT
"""Condition on a trajectory."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which judgements to read."""

    project: str
    policy: str | None = None
    """None: all."""
    judge: str | None = None
    since: datetime | None = None

    @property
    def first_day(self) -> str:
        """The first day: UTC, YYYY-MM-DD; without `since` a value that sorts before all days."""
        return self.since.astimezone(UTC).date().isoformat() if self.since is not None else ""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """The score of a trajectory in a judgement."""

    score: float
    parts: Mapping[str, float]
    position: int
    """Position in the prompt, from 0."""
    attempt: str
    """Equal for trajectories that look the same to the judge and were shown once."""


@dataclass(frozen=True, slots=True)
class StoredJudgement:
    """An accepted judgement."""

    policy: str
    judge: str
    rubric: str
    group_id: str
    attempts_hash: str
    section: int
    at: datetime
    was_called: bool
    """Whether it was a call; else an earlier answer was reused."""
    tokens: int
    cost_usd: float | None
    """None where the price is unknown."""
    scores: Mapping[str, ScoredTrajectory]


@dataclass(frozen=True, slots=True)
class Reference:
    """The reward of a trajectory from a source other than the judge."""

    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Day:
    """What a judge cost on one day for one policy."""

    policy: str
    day: str
    judge: str
    calls: int
    refused: int
    failed: int
    tokens: int
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Groups of one policy that wait for judges for the same reason."""

    policy: str
    why: str | None
    groups: int
    since: datetime
    """When the oldest of these groups closed."""


def policies(connection: Connection, project: str) -> list[str]:
    """Return the names of the project's policies."""
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())


def judgements(connection: Connection, scope: Scope) -> Iterator[StoredJudgement]:
    """Yield the accepted judgements, in the order of acceptance."""
    asked = (j.policy, j.judge, j.rubric_hash, j.group_id, j.attempts_hash, j.section, j.accepted_at)
    taken = (j.cached_from.is_(None), j.prompt_tokens + j.completion_tokens, j.cost_usd, j.scores)
    query = select(*asked, *taken).where(*_accepted(scope)).order_by(j.accepted_at, j.id)
    for *values, scores in connection.execute(query):
        yield StoredJudgement(*(*values, {name: _scored(one) for name, one in (scores or {}).items()}))


def by_feedback(connection: Connection, scope: Scope) -> dict[str, Reference]:
    """Return the rewards that apps and people gave trajectories in judged groups, also if too late for training.

    Parts are those of the last feedback on the whole trajectory that has any.
    """
    stands = (f.project == scope.project, f.source.in_(BY_APPS), f.state.in_(STANDING), f.withdrawn_at.is_(None))
    query = select(*columns_of(schema.feedback, Feedback)).where(*stands)
    of_one = f.trajectory_id.in_(select(t.id).where(_in_judged(scope)))
    left = select(t.left_group_id).where(_in_judged(scope), t.left_group_id.is_not(None))
    of_group = (f.target_kind == "group") & (f.target_id.in_(_groups(scope)) | f.target_id.in_(left))
    counted = [Feedback(*row) for which in (of_one, of_group) for row in connection.execute(query.where(which))]
    parts = {
        one.trajectory_id: one.parts
        for one in sorted(counted, key=lambda one: one.order)
        if one.parts and one.completion_id is None
    }
    rewards = rewards_from_feedback(counted, {one.id: one for one in _judged(connection, scope)})
    return {name: Reference(reward, parts.get(name) or {}) for name, (reward, _) in rewards.items()}


def by_code(connection: Connection, scope: Scope, part: str) -> tuple[dict[str, Reference], set[str]]:
    """Return what reward functions gave trajectories in judged groups under this name, and all names that exist."""
    parts_of = {one.id: one.code_parts for one in _judged(connection, scope) if one.code_parts}
    references = {name: Reference(parts[part], parts) for name, parts in parts_of.items() if part in parts}
    return references, {name for parts in parts_of.values() for name in parts}


def days(connection: Connection, scope: Scope) -> list[Day]:
    """Return what judging cost, by day."""
    wanted = (*_within(scope, schema.judge_days), d.day >= scope.first_day)
    query = select(*columns_of(schema.judge_days, Day)).where(*wanted).order_by(d.day, d.policy, d.judge)
    return [Day(*row) for row in connection.execute(query)]


def waiting(connection: Connection, scope: Scope) -> list[Waiting]:
    """Return the groups that are due for judges, by the reason why they are not ranked yet."""
    columns = (g.policy, g.judge_waits, func.count(), func.min(g.closed_at, type_=g.closed_at.type))
    waits = (*_within(scope, schema.groups), g.state == "closed", g.judge_due_at.is_not(None))
    query = select(*columns).where(*waits).group_by(g.policy, g.judge_waits).order_by(g.policy, func.count().desc())
    return [Waiting(*row) for row in connection.execute(query)]


def ranked(connection: Connection, scope: Scope) -> list[RankedGroup]:
    """Return the groups that judges have ranked, the oldest first; means are over their attempts."""
    discarded = func.coalesce(g.reason == WhyNotTrained.JUDGE_NOISE.value, literal(False))
    means = (func.min(t.first_version), func.avg(t.reward), cast(func.avg(t.sampled_tokens), Float))
    is_member = (t.project == g.project) & (t.group_id == g.id) & _HAS_TEXT
    query = (
        select(g.id, g.policy, g.judged_at, g.judge_noise, discarded, *means)
        .join_from(schema.groups, schema.trajectories, is_member)
        .where(g.judged_at.is_not(None), *_within(scope, schema.groups, g.judged_at))
        .group_by(g.project, g.id)
        .order_by(g.judged_at, g.id)
    )
    return [RankedGroup(*row) for row in connection.execute(query)]


def texts(connection: Connection, project: str, group_ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield group, trajectory and text of all answers in these groups; the answers of a trajectory are consecutive."""
    is_of = (c.project == t.project) & (c.trajectory_id == t.id)
    query = select(t.group_id, t.id, response_text).join_from(schema.trajectories, schema.completions, is_of)
    answers = query.where(t.project == project, _HAS_TEXT).order_by(t.id, c.turn)
    for group_id, trajectory_id, answer in rows_of(connection, answers, t.group_id, group_ids):
        yield group_id, trajectory_id, answer or ""


def drift(connection: Connection, scope: Scope) -> list[DriftDay]:
    """Return comparisons of judges and strong judges, by day."""
    rows = connection.execute(_DRIFT, {"project": scope.project})
    days = [DriftDay(row.policy, str(row.day), row.pairs, float(row.agreement), float(row.difference)) for row in rows]
    return [one for one in days if one.day >= scope.first_day and scope.policy in (None, one.policy)]


def _within(scope: Scope, table: Table, at: ColumnElement[Any] | None = None) -> list[ColumnElement[bool]]:
    """Return the conditions that rows belong to the scope: to its project, policy and judge, and its time by `at`."""
    wanted = {"project": scope.project, "policy": scope.policy, "judge": scope.judge}
    conditions = [table.c[name] == value for name, value in wanted.items() if value and name in table.c]
    return conditions if at is None or scope.since is None else [*conditions, at >= scope.since]


def _accepted(scope: Scope) -> list[ColumnElement[bool]]:
    return [*_within(scope, schema.judgements, j.accepted_at), j.state == "accepted"]


def _groups(scope: Scope) -> Select[Any]:
    return select(j.group_id).where(*_accepted(scope))


def _in_judged(scope: Scope) -> ColumnElement[bool]:
    return (t.project == scope.project) & t.group_id.in_(_groups(scope))


def _judged(connection: Connection, scope: Scope) -> Iterator[Trajectory]:
    """Yield the trajectories in judged groups."""
    query = select(*columns_of(schema.trajectories, Trajectory)).where(_in_judged(scope))
    return (Trajectory(*row) for row in connection.execute(query))


def _scored(score: Mapping[str, Any]) -> ScoredTrajectory:
    return ScoredTrajectory(score["score"], score.get("parts") or {}, score["position"], score["attempt"])
