"""Delete everything that belongs to a trajectory: every row that contains its content or exists only for it.

Locks are taken in the judge's order: policies first, so that no step claims what is about to be deleted; then feedback,
groups, trajectories. A trajectory that another process is writing to is left for a later pass. Rows that only refer to
its id stay: steps, groups, and which step took which trajectory.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, or_, select

from migrations import schema
from whetstone.database.engine import chunks
from whetstone.privacy.store import SEARCH_LIMIT, Erasure, Target, add, learned, taken

UNCLAIMED = ("open", "closed", "scored")
"""States of a group that the judge still decides on."""

t, c, f, g = schema.trajectories.c, schema.completions.c, schema.feedback.c, schema.groups.c
e, x, j, s = schema.evaluations.c, schema.examples.c, schema.judgements.c, schema.steps.c


@dataclass(frozen=True)
class Remainder:
    """Trajectories of a deletion that were not deleted."""

    waiting: frozenset[str]
    """Claimed by a step."""
    busy: frozenset[str]
    """In use by another writer."""


def delete_some(connection: Connection, erasure: Erasure, ids: Collection[str], now: datetime) -> Remainder:
    """Delete trajectories and everything that contains their content; those claimed by a step wait for its end."""
    if connection.dialect.name == "sqlite":
        # Otherwise the old content stays in the file until something else overwrites it.
        connection.exec_driver_sql("PRAGMA secure_delete = ON")
    project = erasure.project
    here = (t.project == project, t.id.in_(ids))
    p = schema.policies.c
    policies = sorted(connection.scalars(select(t.policy).where(*here).distinct()))
    locked = select(p.id).where(p.project == project, p.id.in_(policies)).order_by(p.id)
    connection.execute(locked.with_for_update(key_share=True)).all()
    waiting = frozenset(taken(connection, project, ids))
    groups = _groups(connection, project, ids)
    for which in (_feedback_on(project, ids), _feedback_on_groups(project, groups)):
        _lock(connection, schema.feedback, which)
    _lock(connection, schema.groups, and_(g.project == project, g.id.in_(groups)))
    free = select(t.id).where(*here, t.id.not_in(waiting)).order_by(t.id).with_for_update(skip_locked=True)
    gone = list(connection.scalars(free))
    if gone:
        groups, versions = _groups(connection, project, gone), learned(connection, project, gone)
        _forget_judgements(connection, project, groups, gone)
        _forget_feedback(connection, project, groups, gone)
        _forget_copies(connection, project, gone)
        deleted = connection.execute(delete(schema.completions).where(c.project == project, c.trajectory_id.in_(gone)))
        connection.execute(delete(schema.trajectories).where(t.project == project, t.id.in_(gone)))
        _look_again(connection, project, groups, now)
        add(connection, erasure, len(gone), deleted.rowcount, versions)
    return Remainder(waiting, frozenset(connection.scalars(select(t.id).where(*here))) - waiting)


def forget_user(connection: Connection, target: Target) -> None:
    """Delete the running means that are stored under the user's name."""
    b = schema.baselines.c
    connection.execute(delete(schema.baselines).where(b.project == target.project, b.end_user.in_(target.users)))


def forget_old_feedback(connection: Connection, target: Target) -> int:
    """Delete feedback older than the target whose trajectory is deleted or never arrived. Returns how many rows; at
    most SEARCH_LIMIT per call."""
    before = datetime.fromisoformat(target.name)
    there = select(t.id).where(t.project == f.project, t.id == f.trajectory_id).exists()
    members = select(t.id).where(t.project == f.project, t.group_id == f.target_id).exists()
    gone = and_(~there, or_(f.target_kind != "group", ~members))
    old = select(f.id).where(f.project == target.project, f.created_at < before, gone).limit(SEARCH_LIMIT)
    ids = connection.scalars(old).all()
    for some in chunks(ids):
        connection.execute(delete(schema.feedback).where(f.project == target.project, f.id.in_(some)))
    return len(ids)


def _groups(connection: Connection, project: str, ids: Collection[str]) -> list[str]:
    """Return the ids of the groups that they are or were in."""
    rows = connection.execute(select(t.group_id, t.left_group_id).where(t.project == project, t.id.in_(ids)))
    return sorted({one for row in rows for one in row if one is not None})


def _feedback_on(project: str, ids: Collection[str]) -> ColumnElement[bool]:
    """Return the condition for feedback on these trajectories and their completions, matched or still waiting."""
    here = (c.project == project, c.trajectory_id.in_(ids))
    named = or_(
        f.target_id.in_(ids),
        f.target_id.in_(select(c.id).where(*here)),
        f.target_id.in_(select(c.upstream_id).where(*here)),
    )
    return and_(
        f.project == project,
        or_(f.trajectory_id.in_(ids), and_(f.trajectory_id.is_(None), named)),
        f.target_kind != "group",
    )


def _feedback_on_groups(project: str, groups: Collection[str]) -> ColumnElement[bool]:
    return and_(f.project == project, f.target_kind == "group", f.target_id.in_(groups))


def _lock(connection: Connection, table: Table, which: ColumnElement[bool]) -> None:
    connection.execute(select(table.c.id).where(which).order_by(table.c.id).with_for_update(key_share=True)).all()


def _forget_feedback(connection: Connection, project: str, groups: Collection[str], ids: Collection[str]) -> None:
    """Delete feedback on these trajectories; in feedback on their groups, keep only the other members' numbers."""
    connection.execute(delete(schema.feedback).where(_feedback_on(project, ids)))
    for row in connection.execute(select(f.id, f.rewards).where(_feedback_on_groups(project, groups))).all():
        rewards = row.rewards and {name: number for name, number in row.rewards.items() if name not in ids}
        values = {"rewards": rewards, "comment": None, "metadata": None}
        connection.execute(schema.feedback.update().where(f.project == project, f.id == row.id).values(values))


def _forget_judgements(connection: Connection, project: str, groups: Collection[str], ids: Collection[str]) -> None:
    """Delete the judges' texts, which may quote any attempt of the group; the other members' scores stay."""
    of_groups = and_(j.project == project, j.group_id.in_(groups))
    connection.execute(delete(schema.judgements).where(of_groups, j.state == "waiting"))
    for row in connection.execute(select(j.id, j.scores).where(of_groups)).all():
        scores = {name: score | {"explanation": None} for name, score in (row.scores or {}).items() if name not in ids}
        values = {"scores": scores, "error": None, "cache_key": None}
        connection.execute(schema.judgements.update().where(j.project == project, j.id == row.id).values(values))


def _forget_copies(connection: Connection, project: str, ids: Collection[str]) -> None:
    """Delete the copies that were made of them for training and for tests."""
    connection.execute(delete(schema.examples).where(x.project == project, x.trajectory_id.in_(ids)))
    prompts = select(c.id).where(c.project == project, c.trajectory_id.in_(ids))
    connection.execute(delete(schema.evaluations).where(e.project == project, e.source_id.in_(prompts)))
    drawn = (e.project == project, e.trajectory_id.in_(ids))
    connection.execute(schema.evaluations.update().where(*drawn).values(error="deleted"))
    m = schema.step_trajectories.c
    took = select(m.step_id).where(m.project == project, m.trajectory_id.in_(ids))
    with_file = (s.project == project, s.kept.is_not(None), s.id.in_(took))
    connection.execute(schema.steps.update().where(*with_file).values(kept=None))


def _look_again(connection: Connection, project: str, groups: Collection[str], now: datetime) -> None:
    """Make the judge re-evaluate unclaimed groups; a group without members loses its prompt hash."""
    of_groups = (g.project == project, g.id.in_(groups))
    unclaimed = (*of_groups, g.state.in_(UNCLAIMED))
    connection.execute(schema.groups.update().where(*of_groups).values(judge_waits=None))
    connection.execute(schema.groups.update().where(*unclaimed).values(due_at=now))
    # A judge that is reading the group at this moment loses its lease on it.
    leased = (*unclaimed, g.judge_due_at.is_not(None))
    connection.execute(schema.groups.update().where(*leased).values(judge_due_at=now))
    left = select(t.id).where(t.project == g.project, t.group_id == g.id).exists()
    connection.execute(schema.groups.update().where(*of_groups, ~left).values(prompt_hash=None))
