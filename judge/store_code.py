"""The SQL around reward functions: what they are told of a trajectory, and what they said. No other table is moved."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, select, text

from judge import store
from judge.attempts import Attempt, Said, Spoken
from judge.facts import Trajectory
from judge.standing import given
from migrations import schema
from migrations.types import Json

f, t, c = schema.feedback.c, schema.trajectories.c, schema.completions.c

_CONVERSATION = text(
    "SELECT messages FROM admin_conversations WHERE project = :project AND completion_id = :completion_id"
).columns(messages=Json)


@dataclass(frozen=True, slots=True)
class Ran:
    """What the functions of its policy said about one trajectory."""

    id: str
    code_parts: dict[str, float]
    code_error: str | None


def due_from(connection: Connection, project: str, trajectory_ids: Collection[str], when: datetime) -> None:
    """Have functions look at these trajectories from `when` on; those that none is to look at any more stay.

    The caller has locked them.
    """
    is_one = (t.project == project, t.id == bindparam("one"), t.code_due_at.is_not(None))
    update = schema.trajectories.update().where(*is_one).values(code_due_at=when)
    if trajectory_ids:
        connection.execute(update, [{"one": trajectory_id} for trajectory_id in sorted(trajectory_ids)])


def attempt(connection: Connection, project: str, trajectory: Trajectory) -> Attempt:
    """What functions are told of a trajectory."""
    about = select(t.task, t.metadata, t.end_user).where(t.project == project, t.id == trajectory.id)
    row = connection.execute(about).one()
    completions = _completions(connection, project, trajectory.id)
    messages: list[Any] = []
    if completions:
        last = completions[-1]
        prompt = connection.execute(_CONVERSATION, {"project": project, "completion_id": last.completion_id})
        messages = [*(prompt.scalar_one() or []), *([last.response] if last.response else [])]
    group_ids = store.groups_of(connection, project, [trajectory.id])
    standing = store.standing(connection, project, [trajectory.id], group_ids)
    reward, _ = given(standing, {trajectory.id: trajectory}).get(trajectory.id, (None, None))
    return Attempt(
        trajectory_id=trajectory.id,
        policy=trajectory.policy,
        task=row.task,
        split=trajectory.split,
        metadata=row.metadata,
        end_user=row.end_user,
        messages=messages,
        completions=completions,
        reward=reward,
        feedback=_feedback(connection, project, trajectory, [one.id for one in standing]),
    )


def write(connection: Connection, project: str, ran: Sequence[Ran]) -> None:
    """Write what functions said; these trajectories are no longer due. The caller has locked them."""
    is_one = (t.project == project, t.id == bindparam("one"))
    values = {name: bindparam(f"b_{name}", type_=t[name].type) for name in ("code_parts", "code_error")}
    update = schema.trajectories.update().where(*is_one).values(code_due_at=None, **values)
    rows = [{"one": one.id, "b_code_parts": one.code_parts, "b_code_error": one.code_error} for one in ran]
    if rows:
        connection.execute(update, rows)


def _completions(connection: Connection, project: str, trajectory_id: str) -> list[Spoken]:
    columns = [c.id if field.name == "completion_id" else c[field.name] for field in fields(Spoken)]
    query = select(*columns).where(c.project == project, c.trajectory_id == trajectory_id).order_by(c.turn)
    return [Spoken(*row) for row in connection.execute(query)]


def _feedback(connection: Connection, project: str, trajectory: Trajectory, ids: Sequence[str]) -> list[Said]:
    """These feedbacks in the order they were given; of a group's, what it says of this trajectory."""
    columns = (f.completion_id, f.source, f.reward, f.parts, f.comment, f.rewards)
    query = select(*columns).where(f.project == project, f.id.in_(ids)).order_by(f.created_at, f.id)
    return [
        Said(row.completion_id, row.source, (row.rewards or {}).get(trajectory.id, row.reward), row.parts, row.comment)
        for row in connection.execute(query)
    ]
