"""What is stored of judging, for people who ask how good it was. The SQL of `judge.ruler.__main__`: it only reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Float, Select, cast, func, literal, select, text

from judge.facts import Feedback, Trajectory
from judge.ruler.alarms import DriftDay
from judge.standing import given
from judge.store import IS_ATTEMPT, STANDING, columns_of
from migrations import schema
from migrations.database import chunks
from migrations.words import response_text
from whetstone.reasons import WhyNotTrained

f, g, t, c = schema.feedback.c, schema.groups.c, schema.trajectories.c, schema.completions.c
j, d, p = schema.judgements.c, schema.judge_days.c, schema.policies.c

BY_APPS = ("reward", "thumbs", "parts")
"""Sources of feedback that is somebody else's word than the judges'."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What is asked about."""

    project: str
    policy: str | None = None
    """None: all."""
    judge: str | None = None
    since: datetime | None = None

    @property
    def first_day(self) -> str:
        """UTC, YYYY-MM-DD; what comes before all days without a beginning."""
        return self.since.astimezone(UTC).date().isoformat() if self.since is not None else ""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a judgement gave a trajectory."""

    score: float
    parts: Mapping[str, float]
    position: int
    """As shown, from 0."""
    attempt: str
    """Equal for trajectories that the judge could not tell apart, and was shown once."""


@dataclass(frozen=True, slots=True)
class Said:
    """An accepted judgement."""

    policy: str
    judge: str
    rubric: str
    group_id: str
    attempts_hash: str
    section: int
    at: datetime
    asked: bool
    """Whether it was a call; else an earlier answer was used again."""
    tokens: int
    cost_usd: float | None
    """None where the price is unknown."""
    scores: Mapping[str, Scored]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a trajectory was worth by somebody else's word."""

    reward: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Day:
    """What a judge took in one day of one policy."""

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
    """When the oldest of them closed."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A group that judges have ranked."""

    id: str
    policy: str
    at: datetime
    noise: float | None
    discarded: bool
    """Because its scores differ by less than judges differ from themselves."""
    version: int | None
    reward: float | None
    tokens: float | None


def policies(connection: Connection, project: str) -> list[str]:
    """Their names."""
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())


def judgements(connection: Connection, scope: Scope) -> Iterator[Said]:
    """The accepted judgements, in the order they were accepted."""
    columns = (j.policy, j.judge, j.rubric_hash, j.group_id, j.attempts_hash, j.section, j.accepted_at)
    taken = (j.cached_from.is_(None), j.prompt_tokens + j.completion_tokens, j.cost_usd, j.scores)
    query = _accepted(select(*columns, *taken), scope).order_by(j.accepted_at, j.id)
    for *values, scores in connection.execute(query):
        yield Said(*(*values, {name: _scored(one) for name, one in (scores or {}).items()}))


def by_feedback(connection: Connection, scope: Scope) -> dict[str, Reference]:
    """What apps and people said of the trajectories in judged groups, whether it came in time to be trained on or not.

    Parts are those of the last feedback on the whole trajectory that has any.
    """
    trajectories = {one.id: one for one in _judged(connection, scope)}
    stands = (f.project == scope.project, f.source.in_(BY_APPS), f.state.in_(STANDING), f.withdrawn_at.is_(None))
    columns = columns_of(schema.feedback, Feedback)
    of_one = f.trajectory_id.in_(select(t.id).where(_in_judged(scope)))
    left = select(t.left_group_id).where(_in_judged(scope), t.left_group_id.is_not(None))
    of_group = (f.target_kind == "group") & (f.target_id.in_(_groups(scope)) | f.target_id.in_(left))
    counted = [
        Feedback(*row)
        for which in (of_one, of_group)
        for row in connection.execute(select(*columns).where(*stands, which))
    ]
    parts = {
        one.trajectory_id: one.parts
        for one in sorted(counted, key=lambda one: one.order)
        if one.parts and one.completion_id is None
    }
    rewards = given(counted, trajectories)
    return {name: Reference(reward, parts.get(name) or {}) for name, (reward, _) in rewards.items()}


def by_code(connection: Connection, scope: Scope, part: str) -> tuple[dict[str, Reference], set[str]]:
    """What reward functions gave the trajectories in judged groups under this name, and the names there are."""
    found = {one.id: one.code_parts for one in _judged(connection, scope) if one.code_parts}
    references = {name: Reference(parts[part], parts) for name, parts in found.items() if part in parts}
    return references, {name for parts in found.values() for name in parts}


def days(connection: Connection, scope: Scope) -> list[Day]:
    """What judging took, by day."""
    wanted = [d.project == scope.project, d.day >= scope.first_day]
    wanted += [column == value for column, value in ((d.policy, scope.policy), (d.judge, scope.judge)) if value]
    query = select(*columns_of(schema.judge_days, Day)).where(*wanted).order_by(d.day, d.policy, d.judge)
    return [Day(*row) for row in connection.execute(query)]


def waiting(connection: Connection, scope: Scope) -> list[Waiting]:
    """Groups that are due for judges, by why they are not ranked yet."""
    wanted = [g.project == scope.project, g.state == "closed", g.judge_due_at.is_not(None)]
    wanted += [g.policy == scope.policy] if scope.policy else []
    columns = (g.policy, g.judge_waits, func.count(), func.min(g.closed_at, type_=g.closed_at.type))
    query = select(*columns).where(*wanted).group_by(g.policy, g.judge_waits).order_by(g.policy, func.count().desc())
    return [Waiting(*row) for row in connection.execute(query)]


def ranked(connection: Connection, scope: Scope) -> list[Ranked]:
    """The groups that judges have ranked, the oldest first; means are over the attempts in them."""
    wanted = [g.project == scope.project, g.judged_at.is_not(None)]
    wanted += [g.policy == scope.policy] if scope.policy else []
    wanted += [g.judged_at >= scope.since] if scope.since is not None else []
    discarded = func.coalesce(g.reason == WhyNotTrained.JUDGE_NOISE.value, literal(False))
    means = (func.min(t.first_version), func.avg(t.reward), cast(func.avg(t.sampled_tokens), Float))
    columns = (g.id, g.policy, g.judged_at, g.judge_noise, discarded, *means)
    is_member = (t.project == g.project) & (t.group_id == g.id) & _spoke()
    joined = select(*columns).join_from(schema.groups, schema.trajectories, is_member).where(*wanted)
    query = joined.group_by(g.project, g.id).order_by(g.judged_at, g.id)
    return [Ranked(*row) for row in connection.execute(query)]


def texts(connection: Connection, project: str, group_ids: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Group, trajectory and what was answered, of all answers in these groups; those of a trajectory in a row."""
    is_of = (c.project == t.project) & (c.trajectory_id == t.id)
    query = select(t.group_id, t.id, response_text).join_from(schema.trajectories, schema.completions, is_of)
    for some in chunks(group_ids):
        of_groups = (t.project == project, t.group_id.in_(some), _spoke())
        rows = connection.execute(query.where(*of_groups).order_by(t.id, c.turn))
        yield from ((group, trajectory, said or "") for group, trajectory, said in rows)


def drift(connection: Connection, scope: Scope) -> list[DriftDay]:
    """How judges and strong judges compared, by day."""
    query = "SELECT policy, day, pairs, agreement, difference FROM admin_judge_drift WHERE project = :project"
    rows = connection.execute(text(f"{query} ORDER BY policy, day"), {"project": scope.project})
    found = [DriftDay(row.policy, str(row.day), row.pairs, float(row.agreement), float(row.difference)) for row in rows]
    return [one for one in found if one.day >= scope.first_day and scope.policy in (None, one.policy)]


def _accepted(query: Select[Any], scope: Scope) -> Select[Any]:
    wanted = [j.project == scope.project, j.state == "accepted"]
    wanted += [column == value for column, value in ((j.policy, scope.policy), (j.judge, scope.judge)) if value]
    return query.where(*wanted, *([j.accepted_at >= scope.since] if scope.since is not None else []))


def _groups(scope: Scope) -> Select[Any]:
    return _accepted(select(j.group_id), scope)


def _in_judged(scope: Scope) -> ColumnElement[bool]:
    return (t.project == scope.project) & t.group_id.in_(_groups(scope))


def _judged(connection: Connection, scope: Scope) -> Iterator[Trajectory]:
    """The trajectories in judged groups."""
    query = select(*columns_of(schema.trajectories, Trajectory)).where(_in_judged(scope))
    return (Trajectory(*row) for row in connection.execute(query))


def _spoke() -> ColumnElement[bool]:
    return (t.completions > 0) & IS_ATTEMPT


def _scored(said: Mapping[str, Any]) -> Scored:
    return Scored(said["score"], said.get("parts") or {}, said["position"], said["attempt"])
