"""Run deletions as a series of short transactions, which any process can continue after an interruption.

`erasing` and `resume` yield the transactions one after the other; the caller (`run`, or the proxy through its writer)
runs each and sends its result back. What belongs to a trajectory is every row that contains its content or exists only
for it.

Locks are taken in the judge's order: policies first, so that no step claims what is about to be deleted; then feedback,
groups, trajectories. A trajectory that another process is writing to is left for a later pass. Rows that only refer to
its id stay: steps, groups, and which step took which trajectory.
"""

from collections.abc import Callable, Collection, Generator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Table, and_, delete, or_, select

from migrations import schema
from whetstone.config.trainer import JUDGE
from whetstone.database.engine import chunks, giving_way, insert_all_new
from whetstone.domain.ids import BY_JUDGE
from whetstone.privacy import store
from whetstone.privacy.store import SEARCH_LIMIT, Erasure, Target

AT_ONCE = 100
"""Trajectories deleted in one transaction."""
MOST_LOOKS = 20
"""After this many consecutive passes that find only trajectories in use by writers, the rest is left to the judging
worker."""

UNCLAIMED = ("open", "closed", "scored")
"""States of a group that the judge still decides on."""

t, c, f, g = schema.trajectories.c, schema.completions.c, schema.feedback.c, schema.groups.c
e, x, j, s, m = (
    schema.evaluations.c,
    schema.examples.c,
    schema.judgements.c,
    schema.steps.c,
    schema.step_trajectories.c,
)
a, b, p = schema.answer_ids.c, schema.baselines.c, schema.policies.c
r = schema.erased_responses.c

Transaction = Callable[[Connection], Any]
Transactions = Generator[Transaction, Any, dict[str, Any]]
"""Functions to run, each in a transaction of its own; returns the row of table `erasures`."""


def run(engine: Engine, transactions: Transactions) -> dict[str, Any]:
    """Run all transactions and return the row of the erasure.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unavailable. What was committed remains, and the deletion can be
            continued.
    """
    result = None
    while True:
        try:
            transaction = transactions.send(result)
        except StopIteration as end:
            row: dict[str, Any] = end.value
            return row
        with giving_way(engine), engine.begin() as connection:
            result = transaction(connection)


def erasing(target: Target, now: datetime) -> Transactions:
    """Delete what matches the target; trajectories claimed by steps wait until those steps are over."""
    erasure = yield partial(store.open_erasure, target=target, now=now)
    yield store.await_writers
    if target.kind == "user":
        yield partial(_forget_user, target=target)
    return (yield from _resume(erasure, target, now))


def resume(erasure: Erasure, now: datetime) -> Transactions:
    """Continue a deletion that was interrupted or that waited."""
    # A user's name is no longer available, only its trajectories.
    target = None if erasure.kind == "user" else Target(erasure.project, erasure.kind, erasure.target)
    return (yield from _resume(erasure, target, now))


def _resume(erasure: Erasure, target: Target | None, now: datetime) -> Transactions:
    waiting: frozenset[str] = frozenset()
    if target is not None and target.kind == "age":
        while True:
            matching = yield partial(store.find, target=target, requested_at=erasure.requested_at)
            ids = [one for one in matching if one not in waiting]
            if not ids:
                break
            waiting |= yield from _delete(erasure, ids, now)
        while (yield partial(_forget_old_feedback, target=target)):
            pass
        yield partial(_forget_old_responses, target=target)
    else:
        ids = list(erasure.waits_for or ())
        if erasure.waits_for is None and target is not None:
            ids = yield partial(store.find, target=target, requested_at=erasure.requested_at)
            # From here on any process can continue without knowing the name.
            yield partial(store.update, erasure=erasure, waits_for=ids)
        waiting = yield from _delete(erasure, ids, now)
    row: dict[str, Any] = yield partial(store.close_erasure, erasure=erasure, waits_for=sorted(waiting), now=now)
    return row


def _delete(erasure: Erasure, ids: Collection[str], now: datetime) -> Generator[Transaction, Any, frozenset[str]]:
    """Delete these trajectories; return those that must wait."""
    waiting: frozenset[str] = frozenset()
    todo, looks = list(ids), 0
    while todo and looks < MOST_LOOKS:
        busy: list[str] = []
        for some in chunks(todo, AT_ONCE):
            # Delete files first: without their rows nothing would refer to them.
            for file in (yield partial(store.failed_row_files, project=erasure.project, ids=some)):
                file.unlink(missing_ok=True)
            claimed, in_use = yield partial(_delete_some, erasure=erasure, ids=some, now=now)
            waiting |= claimed
            busy += in_use
        looks = looks + 1 if len(busy) == len(todo) else 0
        todo = busy
    return waiting | frozenset(todo)


def old_of(project: str, keep_days: float, now: datetime) -> Target:
    """Return the target of what is older than the project's retention time, to the hour."""
    before = (now - timedelta(days=keep_days)).replace(minute=0, second=0, microsecond=0)
    return Target(project, "age", before.isoformat())


def _delete_some(
    connection: Connection, erasure: Erasure, ids: Collection[str], now: datetime
) -> tuple[frozenset[str], frozenset[str]]:
    """Delete trajectories and everything that contains their content. Return those that were not deleted: claimed by a
    step, whose end they wait for; and in use by another writer."""
    if connection.dialect.name == "sqlite":
        # Otherwise the old content stays in the file until something else overwrites it.
        connection.exec_driver_sql("PRAGMA secure_delete = ON")
    project = erasure.project
    here = (t.project == project, t.id.in_(ids))
    _lock(connection, schema.policies, and_(p.project == project, p.id.in_(select(t.policy).where(*here))))
    waiting = frozenset(store.taken(connection, project, ids))
    groups = _groups(connection, project, ids)
    _lock(connection, schema.feedback, _feedback_on(project, ids))
    _lock(connection, schema.feedback, _feedback_on_groups(project, groups))
    _lock(connection, schema.groups, and_(g.project == project, g.id.in_(groups)))
    gone = connection.scalars(
        select(t.id).where(*here, t.id.not_in(waiting)).order_by(t.id).with_for_update(skip_locked=True)
    ).all()
    if gone:
        groups, versions = _groups(connection, project, gone), store.learned(connection, project, gone)
        _forget_judgements(connection, project, groups, gone)
        _forget_feedback(connection, project, groups, gone)
        _forget_copies(connection, project, gone)
        _note_responses(connection, project, gone, now)
        of_gone = and_(c.project == project, c.trajectory_id.in_(gone))
        connection.execute(
            delete(schema.answer_ids).where(a.project == project, a.completion_id.in_(select(c.id).where(of_gone)))
        )
        deleted = connection.execute(delete(schema.completions).where(of_gone))
        connection.execute(delete(schema.trajectories).where(t.project == project, t.id.in_(gone)))
        _look_again(connection, project, groups, now)
        store.add(connection, erasure, len(gone), deleted.rowcount, versions)
    return waiting, frozenset(connection.scalars(select(t.id).where(*here))) - waiting


def _forget_user(connection: Connection, target: Target) -> None:
    """Delete the running means that are stored under the user's name."""
    connection.execute(delete(schema.baselines).where(b.project == target.project, b.end_user.in_(target.users)))


def _forget_old_feedback(connection: Connection, target: Target) -> int:
    """Delete feedback older than the target whose trajectory is deleted or never arrived. Returns how many rows; at
    most SEARCH_LIMIT per call."""
    there = select(t.id).where(t.project == f.project, t.id == f.trajectory_id).exists()
    members = select(t.id).where(t.project == f.project, t.group_id == f.target_id).exists()
    ids = connection.scalars(
        select(f.id)
        .where(f.project == target.project, f.created_at < datetime.fromisoformat(target.name))
        .where(~there, or_(f.target_kind != "group", ~members))
        .limit(SEARCH_LIMIT)
    ).all()
    for some in chunks(ids):
        connection.execute(delete(schema.feedback).where(f.project == target.project, f.id.in_(some)))
    return len(ids)


def _forget_old_responses(connection: Connection, target: Target) -> None:
    """Delete the ids of responses that were erased before the target."""
    before = datetime.fromisoformat(target.name)
    connection.execute(delete(schema.erased_responses).where(r.project == target.project, r.erased_at < before))


def _groups(connection: Connection, project: str, ids: Collection[str]) -> list[str]:
    """Return the ids of the groups that they are or were in."""
    rows = connection.execute(select(t.group_id, t.left_group_id).where(t.project == project, t.id.in_(ids)))
    return sorted({one for row in rows for one in row if one is not None})


def _feedback_on(project: str, ids: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for feedback on these trajectories and their completions, matched or still waiting."""
    here = (c.project == project, c.trajectory_id.in_(ids))
    completion_ids = select(c.id).where(*here)
    named = or_(
        f.target_id.in_(ids),
        f.target_id.in_(completion_ids),
        f.target_id.in_(select(c.upstream_id).where(*here)),
        f.target_id.in_(select(a.id).where(a.project == project, a.completion_id.in_(completion_ids))),
    )
    matched = or_(f.trajectory_id.in_(ids), and_(f.trajectory_id.is_(None), named))
    return and_(f.project == project, matched, f.target_kind != "group")


def _feedback_on_groups(project: str, groups: Collection[str]) -> ColumnElement[bool]:
    return and_(f.project == project, f.target_kind == "group", f.target_id.in_(groups))


def _lock(connection: Connection, table: Table, which: ColumnElement[bool]) -> None:
    connection.execute(select(table.c.id).where(which).order_by(table.c.id).with_for_update(key_share=True)).all()


def _forget_feedback(connection: Connection, project: str, groups: Collection[str], ids: Collection[str]) -> None:
    """Delete feedback on these trajectories; in feedback on their groups, keep only the other members' numbers."""
    connection.execute(delete(schema.feedback).where(_feedback_on(project, ids)))
    for row in connection.execute(select(f.id, f.rewards).where(_feedback_on_groups(project, groups))).all():
        rewards = row.rewards and {name: number for name, number in row.rewards.items() if name not in ids}
        connection.execute(
            schema.feedback.update()
            .where(f.project == project, f.id == row.id)
            .values(rewards=rewards, comment=None, metadata=None)
        )


def _forget_judgements(connection: Connection, project: str, groups: Collection[str], ids: Collection[str]) -> None:
    """Delete the judges' texts, which may quote any attempt of the group; the other members' scores stay."""
    of_groups = and_(j.project == project, j.group_id.in_(groups))
    # A step that learned from such a text has put it into a prompt.
    quoted = select(j.id).where(of_groups, x.source_id == x.completion_id + BY_JUDGE + j.id).exists()
    connection.execute(delete(schema.examples).where(x.project == project, x.source == JUDGE, quoted))
    connection.execute(delete(schema.judgements).where(of_groups, j.state == "waiting"))
    for row in connection.execute(select(j.id, j.scores).where(of_groups)).all():
        scores = {name: score | {"explanation": None} for name, score in (row.scores or {}).items() if name not in ids}
        connection.execute(
            schema.judgements.update()
            .where(j.project == project, j.id == row.id)
            .values(scores=scores, error=None, cache_key=None)
        )


def _forget_copies(connection: Connection, project: str, ids: Collection[str]) -> None:
    """Delete the copies that were made of them for training and for tests."""
    connection.execute(delete(schema.examples).where(x.project == project, x.trajectory_id.in_(ids)))
    prompts = select(c.id).where(c.project == project, c.trajectory_id.in_(ids))
    connection.execute(delete(schema.evaluations).where(e.project == project, e.source_id.in_(prompts)))
    connection.execute(
        schema.evaluations.update().where(e.project == project, e.trajectory_id.in_(ids)).values(error="deleted")
    )
    took = select(m.step_id).where(m.project == project, m.trajectory_id.in_(ids))
    connection.execute(
        schema.steps.update().where(s.project == project, s.kept.is_not(None), s.id.in_(took)).values(kept=None)
    )


def _note_responses(connection: Connection, project: str, ids: Collection[str], now: datetime) -> None:
    """Note which stored responses are deleted with these trajectories, so that an app that refers to one learns why it
    is not found. Nothing else of them remains."""
    stored = select(c.upstream_id).where(
        c.project == project, c.trajectory_id.in_(ids), c.choice == 0, c.stored_response.is_not(None)
    )
    rows = [{"project": project, "id": one, "erased_at": now} for one in connection.scalars(stored.distinct())]
    if rows:
        insert_all_new(connection, schema.erased_responses, rows)


def _look_again(connection: Connection, project: str, groups: Collection[str], now: datetime) -> None:
    """Make the judge re-evaluate unclaimed groups; a group without members loses its prompt hash."""
    of_groups = (g.project == project, g.id.in_(groups))
    unclaimed = (*of_groups, g.state.in_(UNCLAIMED))
    connection.execute(schema.groups.update().where(*of_groups).values(judge_waits=None))
    connection.execute(schema.groups.update().where(*unclaimed).values(due_at=now))
    # A judge that is reading the group at this moment loses its lease on it.
    connection.execute(schema.groups.update().where(*unclaimed, g.judge_due_at.is_not(None)).values(judge_due_at=now))
    left = select(t.id).where(t.project == g.project, t.group_id == g.id).exists()
    connection.execute(schema.groups.update().where(*of_groups, ~left).values(prompt_hash=None))
