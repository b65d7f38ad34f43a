"""The judge's SQL: read what is due, read the facts under lock, write the decisions.

Every change names the states it may change, and rows are locked in one order: feedback, groups, trajectories, each by
id. So two workers at once do the work once, and PostgreSQL finds no deadlock between them. SQLite ignores the locks:
there a transaction that writes is alone. The locks are the weak kind (`key_share`), which does not block the insert of
a completion below its trajectory.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from operator import itemgetter
from typing import Any, Literal, TypeVar

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
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

from judge.decisions.model import OVER, UNCLAIMED, Feedback, FeedbackContext, Group, Trajectory
from migrations import schema
from whetstone.database.engine import chunks
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.registry.completion_store import completions_named

f, g, t = schema.feedback.c, schema.groups.c, schema.trajectories.c

STANDING = ("applied", "used", "unused")
"""States of feedback that gave a trajectory its reward, if it was applied."""
WITHDRAWABLE = ("waiting", "applied", "superseded")
"""States of feedback that an app may withdraw."""
IS_ATTEMPT = t.why_not_trained.is_distinct_from(WhyNotTrained.SUPERSEDED.value)
"""Condition on a trajectory: no retry replaced it."""
_EXPRESSIONS = {"demonstrates": f.demonstration.is_not(None)}
"""Fields that are no columns: of large values only this much is needed."""

Value = TypeVar("Value", Feedback, Group, Trajectory)
Item = TypeVar("Item")
Due = Literal["unplaced", "fresh", "waiting", "withdrawn", "idle", "groups", "code", "ranking"]
"""A kind of work. `code`: trajectories that wait for reward functions; `ranking`: groups that wait for judges."""
FeedbackKind = Literal["fresh", "waiting", "withdrawn", "applied"]


def look(engine: Engine, now: datetime, idle_since: datetime) -> set[Due]:
    """Return the kinds of work that are due, without a lock: one read of the first entries of the indexes."""
    heads: dict[Due, tuple[Table, ColumnElement[bool]]] = {
        "unplaced": (schema.trajectories, _UNPLACED),
        "fresh": (schema.feedback, _FRESH),
        "waiting": (schema.feedback, _again(now)),
        "withdrawn": (schema.feedback, _withdrawn(now)),
        "idle": (schema.trajectories, _idle(idle_since)),
        "groups": (schema.groups, g.due_at <= now),
        "code": (schema.trajectories, t.code_due_at <= now),
        "ranking": (schema.groups, g.judge_due_at <= now),
    }
    query = select(*(exists().select_from(table).where(head) for table, head in heads.values()))
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        is_due = connection.execute(query).one()
    return set(itertools.compress(heads, is_due))


def still_unplaced(connection: Connection, project: str, trajectory_ids: Collection[str]) -> list[Trajectory]:
    """Return those of these trajectories that are still not placed. The caller has locked their policies."""
    query = select(*columns_of(schema.trajectories, Trajectory)).where(t.project == project, _UNPLACED)
    return [_value(Trajectory, row) for row in rows_of(connection, query, t.id, trajectory_ids)]


def idle(connection: Connection, since: datetime, limit: int) -> dict[str, list[Trajectory]]:
    """Return open trajectories without a completion after `since`, by project."""
    query = select(t.project, *columns_of(schema.trajectories, Trajectory)).where(_idle(since)).order_by(t.last_seen_at)
    return _values(Trajectory, connection.execute(query.limit(limit)))


def due_feedback(connection: Connection, kind: FeedbackKind, now: datetime, limit: int) -> dict[str, list[Feedback]]:
    """Return the oldest due feedback of a kind, by project; locked, without rows locked by other workers.

    `fresh` feedback has not been looked up yet, `waiting` has to be looked up again; `withdrawn` was withdrawn before
    it was applied. `applied` was withdrawn after that, and is not locked: a transaction that applies other feedback to
    the same trajectory has locked that before these rows, and `known` reads them under its locks.
    """
    due, order = {
        "fresh": (_FRESH, (f.created_at, f.id)),
        "waiting": (_again(now), (f.due_at, f.id)),
        "withdrawn": (_withdrawn(now) & (f.state == "waiting"), (f.withdrawn_at,)),
        "applied": (_withdrawn(now) & (f.state != "waiting"), (f.withdrawn_at,)),
    }[kind]
    query = select(f.project, *columns_of(schema.feedback, Feedback)).where(due).order_by(*order).limit(limit)
    return _values(Feedback, connection.execute(query if kind == "applied" else _skip_locked(query)))


def feedback_of(connection: Connection, project: str, feedback_id: str) -> dict[str, list[Feedback]]:
    """Return this feedback, by project; locked."""
    query = select(f.project, *columns_of(schema.feedback, Feedback)).where(f.project == project, f.id == feedback_id)
    return _values(Feedback, connection.execute(_skip_locked(query)))


def due_groups(connection: Connection, now: datetime, limit: int) -> dict[str, list[str]]:
    """Return ids of unclaimed groups that are due, the longest due first, by project; locked like feedback."""
    query = select(g.project, g.id).where(g.due_at <= now).order_by(g.due_at).limit(limit)
    return by_project((row.project, row.id) for row in connection.execute(_skip_locked(query)))


def code_due(connection: Connection, now: datetime, limit: int) -> dict[str, list[Trajectory]]:
    """Return trajectories due for reward functions, the longest due first, by project; locked like feedback."""
    query = select(t.project, *columns_of(schema.trajectories, Trajectory)).where(t.code_due_at <= now)
    return _values(Trajectory, connection.execute(_skip_locked(query.order_by(t.code_due_at).limit(limit))))


def known(connection: Connection, project: str, batch: Sequence[Feedback]) -> FeedbackContext:
    """Return the project's records of the targets of `batch`: groups and trajectories locked."""
    targets = {(one.target_id, one.choice) for one in batch if one.target_kind == "completion"}
    completions = completions_named(connection, project, targets)
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
    return {str(one) for row in rows_of(connection, query, t.id, trajectory_ids) for one in row if one is not None}


def lock_groups(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, Group]:
    """Return these groups by id, locked."""
    query = select(*columns_of(schema.groups, Group)).where(g.project == project).order_by(g.id)
    rows = rows_of(connection, query.with_for_update(key_share=True), g.id, group_ids)
    return {row.id: _value(Group, row) for row in rows}


def lock_unclaimed(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, Group]:
    """Return these groups by id, locked where no step has claimed them. The caller has locked their policies.

    So no step can claim one meanwhile. A step that ends has locked its groups and needs the policy: to wait here for
    those groups would be a deadlock.
    """
    locked: dict[str, Group] = {}
    for ids in chunks(group_ids):
        query = select(*columns_of(schema.groups, Group)).where(g.project == project, g.id.in_(ids))
        unclaimed = query.with_only_columns(g.id).where(g.state.in_(UNCLAIMED)).order_by(g.id)
        connection.execute(unclaimed.with_for_update(key_share=True)).all()
        locked |= {row.id: _value(Group, row) for row in connection.execute(query)}
    return locked


def lock_trajectories(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, Trajectory]:
    """Return these trajectories by id, locked."""
    query = select(*columns_of(schema.trajectories, Trajectory)).where(t.project == project).order_by(t.id)
    rows = rows_of(connection, query.with_for_update(key_share=True), t.id, trajectory_ids)
    return {row.id: _value(Trajectory, row) for row in rows}


def lock_members(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, list[Trajectory]]:
    """Return the members of these groups by group id, locked; the caller has locked the groups.

    A trajectory that a retry superseded is no attempt of its own, and no member.
    """
    members: dict[str, list[Trajectory]] = {group_id: [] for group_id in group_ids}
    # In no order: any other transaction that locks members has locked their groups, and for an order SQLite would scan
    # the primary key.
    query = select(*columns_of(schema.trajectories, Trajectory)).where(t.project == project)
    for row in connection.execute(query.where(t.group_id.in_(sorted(group_ids))).with_for_update(key_share=True)):
        if row.why_not_trained != WhyNotTrained.SUPERSEDED:
            members[row.group_id].append(_value(Trajectory, row))
    return members


def write_feedback(connection: Connection, project: str, became: Sequence[Feedback]) -> None:
    """Write the outcomes of feedback; one that a step has used or left out, or that is withdrawn, stays unchanged."""
    names = ("state", "reason", "reward", "trajectory_id", "completion_id", "due_at", "applied_at")
    _update(connection, schema.feedback, project, _any_of(f.state, WITHDRAWABLE), names, became)


def set_feedback_aside(connection: Connection, project: str, feedback_id: str, why: str) -> None:
    """Stop processing this feedback: waiting feedback fails, applied feedback still counts."""
    update_rows(
        connection,
        schema.feedback,
        *(f.project == project, f.id == feedback_id),
        state=case((f.state == "waiting", literal("failed", f.state.type)), else_=f.state),
        reason=why,
        withdrawn_at=None,
        due_at=None,
    )


def set_aside(connection: Connection, project: str, trajectory_id: str, now: datetime) -> None:
    """Exclude a trajectory because of a fault, unless a step has it."""
    update_rows(
        connection,
        schema.trajectories,
        *(t.project == project, t.id == trajectory_id, t.state.in_(("open", "ended", "rewarded"))),
        state="excluded",
        why_not_trained=WhyNotTrained.FAULT,
        placed_at=func.coalesce(t.placed_at, literal(now, t.placed_at.type)),
    )


def let_stand(connection: Connection, project: str, feedback_ids: Collection[str]) -> None:
    """Record that this feedback was withdrawn too late: it still counts."""
    for ids in chunks(feedback_ids):
        is_one = (f.project == project, f.id.in_(ids), f.state == "applied")
        update_rows(
            connection,
            schema.feedback,
            *is_one,
            withdrawn_at=None,
            reason="withdrawn after a step had claimed its trajectory",
        )


def write_trajectories(connection: Connection, project: str, changed: Sequence[Trajectory]) -> None:
    """Write decisions about unclaimed trajectories."""
    names = ("state", "reward", "reward_source", "why_not_trained", "group_id", "left_group_id", "ended_at")
    _update(connection, schema.trajectories, project, ~_any_of(t.state, sorted(OVER)), (*names, "code_due_at"), changed)


def write_groups(connection: Connection, project: str, changed: Sequence[Group]) -> None:
    """Write decisions about unclaimed groups."""
    names = (
        *("state", "reason", "formed_by", "size", "rewarded", "reward_mean", "reward_spread", "compared_with"),
        *("closed_at", "due_at", "judge_due_at", "judged_at", "judge_waits"),
    )
    _update(connection, schema.groups, project, _any_of(g.state, UNCLAIMED), names, changed)


def mark_due(connection: Connection, project: str, group_ids: Collection[str], now: datetime) -> None:
    """Mark these groups as due, unless a step has claimed them or they are over. The caller has locked them."""
    update_rows(
        connection, schema.groups, g.project == project, g.id.in_(group_ids), g.state.in_(UNCLAIMED), due_at=now
    )


def ask_to_close(connection: Connection, project: str, request_times: Mapping[str, datetime], now: datetime) -> None:
    """Close these groups, as the app requested; the last request counts. The caller has locked them.

    Members that began after the request are late. So the request's time counts: a sweep may have begun before them.
    """
    _request(connection, project, g.close_asked_at, request_times, due_at=now)


def ask_to_rank(connection: Connection, project: str, request_times: Mapping[str, datetime], now: datetime) -> None:
    """Have judges rank these groups, again where there is a newer request. The caller has locked them."""
    # A group that waits is due now; one with a call to a judge in flight is due when that call is over.
    due_at = case((g.judge_waits.is_(None), g.judge_due_at), else_=null())
    _request(connection, project, g.judge_asked_at, request_times, judge_due_at=due_at, judged_at=None, due_at=now)


def no_longer_due(connection: Connection, project: str, group_ids: Collection[str]) -> None:
    """Clear the due time of these groups: they were claimed or discarded meanwhile."""
    update_rows(connection, schema.groups, g.project == project, g.id.in_(group_ids), due_at=None)


def update_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool], **values: Any) -> int:
    """Set these columns where all conditions hold; return the number of rows."""
    return connection.execute(table.update().where(*conditions).values(values)).rowcount


def _request(
    connection: Connection, project: str, asked_at: Column[Any], request_times: Mapping[str, datetime], **values: Any
) -> None:
    """Write the time of a request and these values to unclaimed groups whose last such request is older."""
    when = bindparam("b_when", type_=asked_at.type)
    is_newer = or_(asked_at.is_(None), asked_at < when)
    is_one = (g.project == project, g.id == bindparam("b_id"), _any_of(g.state, UNCLAIMED), is_newer)
    if rows := [{"b_id": group_id, "b_when": its_time} for group_id, its_time in sorted(request_times.items())]:
        connection.execute(schema.groups.update().where(*is_one).values({asked_at: when, **values}), rows)


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


def _skip_locked(query: Select[Any]) -> Select[Any]:
    """Return the query, locking its rows, without those that other workers have locked."""
    return query.with_for_update(skip_locked=True, key_share=True)


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


def rows_of(
    connection: Connection, query: Select[Any], column: ColumnElement[Any], ids: Collection[str]
) -> Iterator[Any]:
    """Yield the rows in which `column` has one of these ids."""
    for some in chunks(ids):
        yield from connection.execute(query.where(column.in_(some)))


def _update(
    connection: Connection,
    table: Table,
    project: str,
    unless_moved: ColumnElement[bool],
    names: Sequence[str],
    values: Sequence[Feedback | Group | Trajectory],
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


def _values(kind: type[Value], rows: Iterable[Row[Any]]) -> dict[str, list[Value]]:
    """Return the rows, which begin with their project, as values by project."""
    return by_project((row.project, _value(kind, row)) for row in rows)


def by_project(pairs: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Group items by project, in the order of the projects' names."""
    items: dict[str, list[Item]] = {}
    for project, item in sorted(pairs, key=itemgetter(0)):
        items.setdefault(project, []).append(item)
    return items
