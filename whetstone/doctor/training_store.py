"""SQL of what `training` goes by: the state of policies and of their groups. It reads heads of indexes and roll-ups."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, case, column, func, select, table

from migrations import schema
from whetstone.doctor.training import Rewards, ScoredGroups

QUEUE = ("open", "closed", "scored", "claimed")
"""States of groups that no step has finished with."""
RECENT = 100
"""Groups that have closed, the newest, among which those with equal rewards are counted."""
CLOSED = ("scored", "claimed", "trained", "discarded")
"""States of groups that have closed and may have rewards."""
LEAST_SPREAD = 1e-9
"""Standard deviation of a group's rewards below which they are equal; the trainer itself compares their gaps."""

launches = schema.launches.c
g, p, s, v = schema.groups.c, schema.policies.c, schema.steps.c, schema.policy_versions.c
_HOURS = ("project", "policy", "version", "hour", "split", "state", "why_not_trained", "trajectories")
th = table(
    "admin_trajectory_hours", *(column(name) for name in (*_HOURS, "rewarded", "reward_sum", "reward_squares"))
).c


def policies(connection: Connection, project: str, since: datetime, name: str | None = None) -> list[dict[str, Any]]:
    """Return the project's policies, or the one with this name: live version, candidate, last step, groups by state,
    and the attempts since `since` by what became of them."""
    live = (v.project == p.project, v.policy == p.id, v.version == p.live_version)
    query = select(p.id.label("policy"), p.state, p.live_version, p.upstream, p.created_at, p.step_asked_at)
    query = query.add_columns(select(v.promoted_at).where(*live).scalar_subquery().label("live_since"))
    query = query.where(p.project == project, *([] if name is None else [p.id == name]))
    rows = connection.execute(query.order_by(p.id)).all()
    candidates = select(v.policy, func.max(v.version)).where(v.project == project, v.state == "candidate")
    tested: dict[str, int] = {row[0]: row[1] for row in connection.execute(candidates.group_by(v.policy))}
    return [
        {"project": project, **row._mapping, "candidate": tested.get(row.policy)}
        | {"groups": _groups(connection, project, row.policy), "last_step": _last_step(connection, project, row.policy)}
        | {"attempts": _attempts(connection, project, row.policy, since)}
        for row in rows
    ]


def scored(connection: Connection, project: str, policy: str) -> ScoredGroups:
    """Return the groups that wait for a step."""
    # A subquery, because PostgreSQL groups by no expression with parameters.
    each = (
        select(case((g.reward_spread > LEAST_SPREAD, 1), else_=0).label("differs"))
        .add_columns(case((g.compared_with == "baseline", 1), else_=0).label("alone"), g.rewarded, g.closed_at)
        .where(g.project == project, g.policy == policy, g.state == "scored")
        .subquery()
        .c
    )
    query = select(each.alone, each.differs, func.count().label("groups"), func.sum(each.rewarded).label("members"))
    query = query.add_columns(func.min(each.closed_at).label("oldest")).group_by(each.alone, each.differs)
    rows = connection.execute(query).all()
    usable = [row for row in rows if row.alone or row.differs]
    recent, recent_uniform = _recent(connection, project, policy)
    return ScoredGroups(
        groups=sum(row.groups for row in usable if not row.alone),
        singles=sum(int(row.members or 0) for row in usable if row.alone),
        uniform=sum(row.groups for row in rows if not row.alone and not row.differs),
        oldest=min((row.oldest for row in usable if row.oldest is not None), default=None),
        recent=recent,
        recent_uniform=recent_uniform,
    )


def last_launch(connection: Connection, project: str) -> str:
    """Return what the launcher of the project did last, in words."""
    query = select(schema.launches).where(launches.project == project).order_by(launches.number.desc()).limit(1)
    row = connection.execute(query).first()
    if row is None:
        return "the launcher has started no machine yet"
    if row.ended_at is None:
        return f"launch {row.number} runs since {row.created_at:%H:%M} UTC"
    how = f"ended with {row.steps} steps" if row.error is None else row.error
    return f"the last launch, {row.number}, at {row.ended_at:%H:%M} UTC: {how}"


def rewards(connection: Connection, project: str, policy: str, versions: Sequence[int]) -> Rewards:
    """Return number, sum and sum of squares of the rewards of these versions, by split and version."""
    sums = (func.sum(th.rewarded), func.sum(th.reward_sum), func.sum(th.reward_squares))
    query = (
        select(th.split, th.version, *sums)
        .where(th.project == project, th.policy == policy, th.version.in_(versions))
        .group_by(th.split, th.version)
    )
    return {(row[0], row[1]): (int(row[2] or 0), row[3] or 0.0, row[4] or 0.0) for row in connection.execute(query)}


def was_called(connection: Connection, project: str, policy: str) -> bool:
    """Return whether any attempt of the policy is recorded."""
    query = select(th.policy).where(th.project == project, th.policy == policy, th.trajectories > 0).limit(1)
    return connection.execute(query).first() is not None


def _recent(connection: Connection, project: str, policy: str) -> tuple[int, int]:
    """Return how many of the newest groups that have closed have rewards, and in how many of them these are equal."""
    closed: list[tuple[datetime, float]] = []
    # A query for each state: each reads only the end of the index.
    for state in CLOSED:
        query = (
            select(g.closed_at, g.reward_spread, g.compared_with)
            .where(g.project == project, g.policy == policy, g.state == state, g.closed_at.is_not(None))
            .order_by(g.closed_at.desc())
            .limit(RECENT)
        )
        rows = connection.execute(query)
        closed += [(at, spread) for at, spread, by in rows if spread is not None and by != "baseline"]
    newest = sorted(closed, reverse=True)[:RECENT]
    return len(newest), sum(spread <= LEAST_SPREAD for _, spread in newest)


def _groups(connection: Connection, project: str, policy: str) -> dict[str, int]:
    of_it = (g.project == project, g.policy == policy, g.state.in_(QUEUE))
    counted = connection.execute(select(g.state, func.count()).where(*of_it).group_by(g.state))
    return dict.fromkeys(QUEUE, 0) | {row[0]: row[1] for row in counted}


def _attempts(connection: Connection, project: str, policy: str, since: datetime) -> dict[str, int]:
    """Return the number of attempts by why they were not trained on, or else by their state; the most frequent
    first."""
    count = func.sum(th.trajectories)
    query = (
        select(th.state, th.why_not_trained, count)
        .where(th.project == project, th.policy == policy, th.hour >= f"{since:%Y-%m-%d %H:00}")
        .group_by(th.state, th.why_not_trained)
        .having(count > 0)
    )
    counts: dict[str, int] = {}
    for state, reason, number in connection.execute(query):
        counts[reason or state] = counts.get(reason or state, 0) + int(number)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _last_step(connection: Connection, project: str, policy: str) -> dict[str, Any] | None:
    columns = (s.number.label("step"), s.kind, s.state, s.version_in, s.version_out, s.reward_mean, s.error)
    query = select(*columns, s.created_at, s.ended_at).where(s.project == project, s.policy == policy)
    row = connection.execute(query.order_by(s.number.desc()).limit(1)).first()
    return None if row is None else dict(row._mapping)
