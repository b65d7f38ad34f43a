"""The judge's SQL: read what is due, read the facts under lock, write the decisions.

Every change names the states it may change, and rows are locked in one order: feedback, groups, trajectories, each by
id. So two workers at once do the work once, and PostgreSQL finds no deadlock between them. SQLite ignores the locks:
there a transaction that writes is alone. The locks are the weak kind (`key_share`), which does not block the insert of
a completion below its trajectory.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Table,
    bindparam,
    case,
    exists,
    func,
    literal,
    null,
    or_,
    select,
)

from judge.decisions.model import OVER, UNCLAIMED, Feedback, FeedbackContext, FeedbackOutcome, Group, Trajectory
from migrations import schema
from whetstone.database.engine import chunks
from whetstone.domain.why_not_trained import WhyNotTrained

f, g, t, c = schema.feedback.c, schema.groups.c, schema.trajectories.c, schema.completions.c

STANDING = ("applied", "used", "unused")
"""States of feedback that gave a trajectory its reward, if it was applied."""
WITHDRAWABLE = ("waiting", "applied", "superseded")
"""States of feedback that an app may withdraw."""
IS_ATTEMPT = t.why_not_trained.is_distinct_from(WhyNotTrained.SUPERSEDED.value)
"""Condition on a trajectory: no retry replaced it."""
_EXPRESSIONS = {"demonstrates": f.demonstration.is_not(None)}
"""Fields that are no columns: of large values only this much is needed."""

Value = TypeVar("Value", Feedback, Group, Trajectory)


@dataclass(frozen=True, slots=True)
class Due:
    """The kinds of work that are due."""

    unplaced: bool
    fresh: bool
    """Feedback whose target has not been looked up yet."""
    waiting: bool
    """Feedback whose target has to be looked up again."""
    withdrawn: bool
    idle: bool
    groups: bool
    code: bool
    """Trajectories that are due for reward functions."""
    ranking: bool
    """Groups that are due for judges."""


def look(engine: Engine, now: datetime, idle_since: datetime) -> Due:
    """Return what is due, without a lock: one read of the first entries of the indexes."""
    of_groups = (g.due_at <= now, t.code_due_at <= now, g.judge_due_at <= now)
    heads = (_UNPLACED, _FRESH, _again(now), _withdrawn(now), _idle(idle_since), *of_groups)
    trajectories, feedback, groups = schema.trajectories, schema.feedback, schema.groups
    tables = (trajectories, feedback, feedback, feedback, trajectories, groups, trajectories, groups)
    query = select(*(exists().select_from(table).where(head) for table, head in zip(tables, heads, strict=True)))
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        return Due(*(bool(some) for some in connection.execute(query).one()))


def still_unplaced(connection: Connection, project: str, trajectory_ids: Collection[str]) -> list[Trajectory]:
    """Return those of these trajectories that are still not placed. The caller has locked their policies."""
    query = select(*columns_of(schema.trajectories, Trajectory)).where(t.project == project, _UNPLACED)
    rows = (row for ids in chunks(trajectory_ids) for row in connection.execute(query.where(t.id.in_(ids))))
    return [_value(Trajectory, row) for row in rows]


def idle(connection: Connection, since: datetime, limit: int) -> dict[str, list[Trajectory]]:
    """Return open trajectories without a completion after `since`, by project."""
    query = select(t.project, *columns_of(schema.trajectories, Trajectory)).where(_idle(since)).order_by(t.last_seen_at)
    return _by_project(connection.execute(query.limit(limit)), Trajectory)


def fresh_feedback(connection: Connection, limit: int) -> dict[str, list[Feedback]]:
    """Return the oldest unprocessed waiting feedback, by project; locked, without rows locked by other workers."""
    return _feedback(connection, _FRESH, (f.created_at, f.id), limit)


def waiting_feedback(connection: Connection, now: datetime, limit: int) -> dict[str, list[Feedback]]:
    """Return waiting feedback whose target has to be looked up again, locked as by `fresh_feedback`."""
    return _feedback(connection, _again(now), (f.due_at, f.id), limit)


def feedback_of(connection: Connection, project: str, feedback_id: str) -> dict[str, list[Feedback]]:
    """Return this feedback, by project; locked."""
    return _feedback(connection, (f.project == project) & (f.id == feedback_id), (f.id,), 1)


def withdrawn_feedback(connection: Connection, now: datetime, limit: int) -> dict[str, list[Feedback]]:
    """Return feedback that was withdrawn before it was applied, locked as by `fresh_feedback`."""
    return _feedback(connection, _withdrawn(now) & (f.state == "waiting"), (f.withdrawn_at,), limit)


def withdrawn_applied(connection: Connection, now: datetime, limit: int) -> dict[str, list[Feedback]]:
    """Return feedback that was applied and is withdrawn, by project; not locked.

    A transaction that applies other feedback to the same trajectory has locked that before these rows: `known` reads
    them under its locks.
    """
    due = _withdrawn(now) & (f.state != "waiting")
    query = select(f.project, *columns_of(schema.feedback, Feedback)).where(due).order_by(f.withdrawn_at).limit(limit)
    return _by_project(connection.execute(query), Feedback)


def due_groups(connection: Connection, now: datetime, limit: int) -> dict[str, list[str]]:
    """Return ids of unclaimed groups that are due, the longest due first, by project; locked like feedback."""
    query = select(g.project, g.id).where(g.due_at <= now).order_by(g.due_at).limit(limit)
    by_project: dict[str, list[str]] = {}
    for project, group_id in connection.execute(query.with_for_update(skip_locked=True, key_share=True)):
        by_project.setdefault(project, []).append(group_id)
    return by_project


def code_due(connection: Connection, now: datetime, limit: int) -> dict[str, list[Trajectory]]:
    """Return trajectories due for reward functions, the longest due first, by project; locked like feedback."""
    oldest = select(t.project, *columns_of(schema.trajectories, Trajectory)).where(t.code_due_at <= now)
    query = oldest.order_by(t.code_due_at).limit(limit).with_for_update(skip_locked=True, key_share=True)
    return _by_project(connection.execute(query), Trajectory)


def known(connection: Connection, project: str, batch: Sequence[Feedback]) -> FeedbackContext:
    """Return the project's records of the targets of `batch`: groups and trajectories locked."""
    completions = _completions(connection, project, batch)
    named = {one.target_id for one in batch if one.target_kind == "trajectory"}
    named |= {trajectory_id for _, trajectory_id in completions.values()}
    named |= {name for one in batch for name in one.rewards or ()}
    group_ids = {one.target_id for one in batch if one.target_kind == "group"} | groups_of(connection, project, named)
    groups = lock_groups(connection, project, group_ids)
    trajectories = lock_trajectories(connection, project, named)
    states = STANDING if all(one.state == "waiting" for one in batch) else (*STANDING, "superseded")
    return FeedbackContext(
        trajectories, groups, completions, standing(connection, project, trajectories, groups, states)
    )


def groups_of(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Return the ids of the groups that these trajectories belong to, and of those they left."""
    # Neither DISTINCT nor IS NOT NULL: SQLite would scan all groups of the project instead of these ids.
    query = select(t.group_id, t.left_group_id).where(t.project == project)
    rows = (row for ids in chunks(trajectory_ids) for row in connection.execute(query.where(t.id.in_(ids))))
    return {str(one) for row in rows for one in row if one is not None}


def lock_groups(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, Group]:
    """Return these groups by id, locked."""
    query = (
        select(*columns_of(schema.groups, Group))
        .where(g.project == project)
        .order_by(g.id)
        .with_for_update(key_share=True)
    )
    rows = (row for ids in chunks(group_ids) for row in connection.execute(query.where(g.id.in_(ids))))
    return {row.id: _value(Group, row) for row in rows}


def lock_unclaimed(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, Group]:
    """Return these groups by id, locked where no step has claimed them. The caller has locked their policies.

    So no step can claim one meanwhile. A step that ends has locked its groups and needs the policy: to wait here for
    those groups would be a deadlock.
    """
    locked: dict[str, Group] = {}
    for ids in chunks(group_ids):
        of_ids = (g.project == project, g.id.in_(ids))
        unclaimed = select(g.id).where(*of_ids, g.state.in_(UNCLAIMED)).order_by(g.id)
        connection.execute(unclaimed.with_for_update(key_share=True)).all()
        rows = connection.execute(select(*columns_of(schema.groups, Group)).where(*of_ids))
        locked |= {row.id: _value(Group, row) for row in rows}
    return locked


def lock_trajectories(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, Trajectory]:
    """Return these trajectories by id, locked."""
    batches = (_trajectories(connection, project, t.id.in_(ids), (t.id,)) for ids in chunks(trajectory_ids))
    return {one.id: one for some in batches for one in some}


def lock_members(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, list[Trajectory]]:
    """Return the members of these groups by group id, locked; the caller has locked the groups.

    A trajectory that a retry superseded is no attempt of its own, and no member.
    """
    members: dict[str, list[Trajectory]] = {group_id: [] for group_id in group_ids}
    # In no order: any other transaction that locks members has locked their groups, and for an order SQLite would scan
    # the primary key.
    for one in _trajectories(connection, project, t.group_id.in_(sorted(group_ids)), ()):
        if one.why_not_trained == WhyNotTrained.SUPERSEDED:
            continue
        members[str(one.group_id)].append(one)
    return members


def write_feedback(connection: Connection, project: str, became: Sequence[FeedbackOutcome]) -> None:
    """Write the outcomes of feedback; one that a step has used or left out, or that is withdrawn, stays unchanged."""
    names = ("state", "reason", "reward", "trajectory_id", "completion_id", "due_at", "applied_at")
    _update(connection, schema.feedback, project, _any_of(f.state, WITHDRAWABLE), names, became)


def set_feedback_aside(connection: Connection, project: str, feedback_id: str, why: str) -> None:
    """Stop processing this feedback: waiting feedback fails, applied feedback still counts."""
    is_one = (f.project == project, f.id == feedback_id)
    state = case((f.state == "waiting", literal("failed", f.state.type)), else_=f.state)
    connection.execute(
        schema.feedback.update().where(*is_one).values(state=state, reason=why, withdrawn_at=None, due_at=None)
    )


def set_aside(connection: Connection, project: str, trajectory_id: str, now: datetime) -> None:
    """Exclude a trajectory because of a fault, unless a step has it."""
    is_one = (t.project == project, t.id == trajectory_id, t.state.in_(("open", "ended", "rewarded")))
    placed_at = func.coalesce(t.placed_at, literal(now, t.placed_at.type))
    values = {"state": "excluded", "why_not_trained": WhyNotTrained.FAULT, "placed_at": placed_at}
    connection.execute(schema.trajectories.update().where(*is_one).values(values))


def let_stand(connection: Connection, project: str, feedback_ids: Collection[str]) -> None:
    """Record that this feedback was withdrawn too late: it still counts."""
    if not feedback_ids:
        return
    is_one = (f.project == project, f.id.in_(feedback_ids), f.state == "applied")
    why = "withdrawn after a step had claimed its trajectory"
    connection.execute(schema.feedback.update().where(*is_one).values(withdrawn_at=None, reason=why))


def write_trajectories(connection: Connection, project: str, changed: Sequence[Trajectory]) -> None:
    """Write decisions about unclaimed trajectories."""
    decided = ("state", "reward", "reward_source", "why_not_trained", "ended_at", "code_due_at")
    names = ("group_id", "left_group_id", *decided)
    _update(connection, schema.trajectories, project, ~_any_of(t.state, sorted(OVER)), names, changed)


def write_groups(connection: Connection, project: str, changed: Sequence[Group]) -> None:
    """Write decisions about unclaimed groups."""
    decided = ("state", "reason", "formed_by", "size", "rewarded", "reward_mean", "reward_spread", "compared_with")
    names = (*decided, "closed_at", "due_at", "judge_due_at", "judged_at", "judge_waits")
    _update(connection, schema.groups, project, _any_of(g.state, UNCLAIMED), names, changed)


def mark_due(connection: Connection, project: str, group_ids: Collection[str], now: datetime) -> None:
    """Mark these groups as due, unless a step has claimed them or they are over. The caller has locked them."""
    is_one = (g.project == project, g.id.in_(group_ids), g.state.in_(UNCLAIMED))
    connection.execute(schema.groups.update().where(*is_one).values(due_at=now))


def ask_to_close(connection: Connection, project: str, request_times: Mapping[str, datetime], now: datetime) -> None:
    """Close these groups, as the app requested; the last request counts. The caller has locked them.

    Members that began after the request are late. So the request's time counts: a sweep may have begun before them.
    """
    if not request_times:
        return
    when = bindparam("b_when", type_=g.close_asked_at.type)
    newly = or_(g.close_asked_at.is_(None), g.close_asked_at < when)
    is_one = (g.project == project, g.id == bindparam("b_id"), _any_of(g.state, UNCLAIMED), newly)
    rows = [{"b_id": group_id, "b_when": its_time} for group_id, its_time in sorted(request_times.items())]
    connection.execute(schema.groups.update().where(*is_one).values(close_asked_at=when, due_at=now), rows)


def ask_to_rank(connection: Connection, project: str, request_times: Mapping[str, datetime], now: datetime) -> None:
    """Have judges rank these groups, again where there is a newer request. The caller has locked them."""
    for group_id, when in sorted(request_times.items()):
        is_one = (g.project == project, g.id == group_id, g.state.in_(UNCLAIMED))
        newly = or_(g.judge_asked_at.is_(None), g.judge_asked_at < when)
        # A group that waits is due now; one with a call to a judge in flight is due when that call is over.
        due_at = case((g.judge_waits.is_(None), g.judge_due_at), else_=null())
        values = {"judge_asked_at": when, "judge_due_at": due_at, "judged_at": None, "due_at": now}
        connection.execute(schema.groups.update().where(*is_one, newly).values(values))


def no_longer_due(connection: Connection, project: str, group_ids: Collection[str]) -> None:
    """Clear the due time of these groups: they were claimed or discarded meanwhile."""
    connection.execute(schema.groups.update().where(g.project == project, g.id.in_(group_ids)).values(due_at=None))


def _is(column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
    """Return an equality with a literal, not a bound value: else neither database uses a partial index."""
    return column == literal(value, literal_execute=True)


def _any_of(column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
    """Return an `IN` condition for a statement that is executed with many rows at once."""
    return or_(*(column == value for value in values))


_UNPLACED = t.placed_at.is_(None)
_FRESH = _is(f.state, "waiting") & f.due_at.is_(None)


def _again(now: datetime) -> ColumnElement[bool]:
    return _is(f.state, "waiting") & (f.due_at <= now)


def _withdrawn(now: datetime) -> ColumnElement[bool]:
    # The states, written as in the partial index.
    states: BindParameter[Any] = bindparam("withdrawable", WITHDRAWABLE, expanding=True, literal_execute=True)
    return (f.withdrawn_at <= now) & f.state.in_(states)


def _idle(since: datetime) -> ColumnElement[bool]:
    return _is(t.state, "open") & (t.last_seen_at <= since)


def _feedback(
    connection: Connection, due: ColumnElement[bool], order: tuple[ColumnElement[Any], ...], limit: int
) -> dict[str, list[Feedback]]:
    query = select(f.project, *columns_of(schema.feedback, Feedback)).where(due).order_by(*order).limit(limit)
    return _by_project(connection.execute(query.with_for_update(skip_locked=True, key_share=True)), Feedback)


def _completions(
    connection: Connection, project: str, batch: Sequence[Feedback]
) -> dict[tuple[str, int], tuple[str, str]]:
    """Return (target id, choice) -> (completion id, trajectory id), for our own ids and vLLM's."""
    wanted = {(one.target_id, one.choice) for one in batch if one.target_kind == "completion"}
    if not wanted:
        return {}
    ids = sorted({target_id for target_id, _ in wanted})
    columns = select(c.id, c.upstream_id, c.choice, c.trajectory_id).where(c.project == project)
    # Latest first: if an upstream id repeats, the earliest call overwrites the others.
    theirs = sorted(connection.execute(columns.where(c.upstream_id.in_(ids))), key=lambda row: row.id, reverse=True)
    ours_by_call = {(row.upstream_id, row.choice): (row.id, row.trajectory_id) for row in theirs}
    ours = {row.id: (row.id, row.trajectory_id) for row in connection.execute(columns.where(c.id.in_(ids)))}
    return ours_by_call | {key: ours[key[0]] for key in wanted if key[0] in ours}


def standing(
    connection: Connection,
    project: str,
    trajectory_ids: Collection[str],
    group_ids: Collection[str],
    states: Sequence[str] = STANDING,
) -> list[Feedback]:
    """Return feedback that was applied to these trajectories and groups, and is in one of `states`."""
    # Feedback that came after a step had claimed its trajectory never counted: it was not applied.
    counted = (f.project == project, f.state.in_(states), f.applied_at.is_not(None))
    applied = select(*columns_of(schema.feedback, Feedback)).where(*counted)
    queries = [applied.where(f.trajectory_id.in_(ids)) for ids in chunks(trajectory_ids)]
    queries += [applied.where(_is(f.target_kind, "group"), f.target_id.in_(ids)) for ids in chunks(group_ids)]
    return [_value(Feedback, row) for query in queries for row in connection.execute(query)]


def _trajectories(
    connection: Connection, project: str, which: ColumnElement[bool], order: tuple[ColumnElement[Any], ...]
) -> list[Trajectory]:
    query = select(*columns_of(schema.trajectories, Trajectory)).where(t.project == project, which).order_by(*order)
    return [_value(Trajectory, row) for row in connection.execute(query.with_for_update(key_share=True))]


def _update(
    connection: Connection,
    table: Table,
    project: str,
    unless_moved: ColumnElement[bool],
    names: Sequence[str],
    values: Sequence[FeedbackOutcome | Group | Trajectory],
) -> None:
    if not values:
        return
    new = {name: bindparam(f"b_{name}", type_=table.c[name].type) for name in names}
    is_one = (table.c.project == project, table.c.id == bindparam("b_id"), unless_moved)
    rows = [{f"b_{name}": getattr(one, name) for name in ("id", *names)} for one in values]
    connection.execute(table.update().where(*is_one).values(new), rows)


def columns_of(table: Table, kind: type[Any]) -> list[ColumnElement[Any]]:
    """Return the table's columns that make a value of this kind, in the order of its fields."""
    return [_EXPRESSIONS[field.name] if field.name in _EXPRESSIONS else table.c[field.name] for field in fields(kind)]


def _value(kind: type[Value], row: Row[Any]) -> Value:
    """Return the row's last columns as a value; the columns before them are the project."""
    return kind(*row[len(row) - len(fields(kind)) :])


def _by_project(rows: Iterable[Row[Any]], kind: type[Value]) -> dict[str, list[Value]]:
    by_project: dict[str, list[Value]] = {}
    for row in rows:
        by_project.setdefault(row.project, []).append(_value(kind, row))
    return {project: by_project[project] for project in sorted(by_project)}
