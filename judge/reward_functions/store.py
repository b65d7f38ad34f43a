"""The SQL of reward functions: read what they get of a trajectory, write their results. Changes no other table.

`Attempt` and its parts, written as JSON, are a function's argument. docs/rewards_in_code.md describes them to the
authors of functions: fields may be added here, none may be removed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, select, text

from judge.decisions.feedback import rewards_from_feedback
from judge.decisions.model import Trajectory
from judge.store import unit_of_work
from migrations import schema
from whetstone.database.engine import chunks
from whetstone.database.types import Json

f, t, c = schema.feedback.c, schema.trajectories.c, schema.completions.c

_CONVERSATION = text(
    "SELECT messages FROM admin_conversations WHERE project = :project AND completion_id = :completion_id"
).columns(messages=Json)


@dataclass(frozen=True, slots=True)
class CompletionPayload:
    """One completion of the trajectory."""

    completion_id: str
    turn: int
    response: Mapping[str, Any] | None
    finish_reason: str | None
    status: str
    policy_version: int
    total_ms: float | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class FeedbackPayload:
    """One feedback that counts."""

    completion_id: str | None
    """The completion that it targets; None where it targets the whole trajectory."""
    source: str
    reward: float | None
    parts: Mapping[str, float] | None
    comment: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trajectory that has ended."""

    trajectory_id: str
    policy: str
    task: str | None
    split: str
    metadata: Mapping[str, Any] | None
    end_user: str | None
    messages: list[Any]
    """The conversation of its last completion, including that completion's answer."""
    completions: list[CompletionPayload]
    reward: float | None
    """The reward from feedback alone."""
    feedback: list[FeedbackPayload]


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of its policy's functions for one trajectory."""

    id: str
    code_parts: dict[str, float]
    code_error: str | None


def due_from(connection: Connection, project: str, trajectory_ids: Collection[str], when: datetime) -> None:
    """Make these trajectories due for functions from `when` on; those that are no longer due stay unchanged.

    The caller has locked them.
    """
    for ids in chunks(trajectory_ids):
        is_due = (t.project == project, t.id.in_(ids), t.code_due_at.is_not(None))
        unit_of_work.update_rows(connection, schema.trajectories, *is_due, code_due_at=when)


def attempt(connection: Connection, project: str, trajectory: Trajectory) -> Attempt:
    """Return the argument of the functions for a trajectory."""
    about = select(t.task, t.metadata, t.end_user).where(t.project == project, t.id == trajectory.id)
    task, metadata, end_user = connection.execute(about).one()
    completions = _completions(connection, project, trajectory.id)
    messages: list[Any] = []
    if completions:
        last = completions[-1]
        prompt = connection.execute(_CONVERSATION, {"project": project, "completion_id": last.completion_id})
        messages = [*(prompt.scalar_one() or []), *([last.response] if last.response else [])]
    group_ids = unit_of_work.groups_of(connection, project, [trajectory.id])
    standing = unit_of_work.standing(connection, project, [trajectory.id], group_ids)
    reward, _ = rewards_from_feedback(standing, {trajectory.id: trajectory}).get(trajectory.id, (None, None))
    return Attempt(
        trajectory_id=trajectory.id,
        policy=trajectory.policy,
        task=task,
        split=trajectory.split,
        metadata=metadata,
        end_user=end_user,
        messages=messages,
        completions=completions,
        reward=reward,
        feedback=_feedback(connection, project, trajectory, [one.id for one in standing]),
    )


def write(connection: Connection, project: str, ran: Sequence[Ran]) -> None:
    """Write the functions' results; these trajectories are no longer due. The caller has locked them."""
    if ran:
        new = {name: bindparam(f"b_{name}", type_=t[name].type) for name in ("code_parts", "code_error")}
        update = schema.trajectories.update().where(t.project == project, t.id == bindparam("b_id"))
        rows = [{f"b_{name}": value for name, value in asdict(one).items()} for one in ran]
        connection.execute(update.values(code_due_at=None, **new), rows)


def _completions(connection: Connection, project: str, trajectory_id: str) -> list[CompletionPayload]:
    columns = [c.id if field.name == "completion_id" else c[field.name] for field in fields(CompletionPayload)]
    query = select(*columns).where(c.project == project, c.trajectory_id == trajectory_id).order_by(c.turn)
    return [CompletionPayload(*row) for row in connection.execute(query)]


def _feedback(
    connection: Connection, project: str, trajectory: Trajectory, ids: Sequence[str]
) -> list[FeedbackPayload]:
    """Return these feedbacks in the order they were given; of a group's feedback, its entry for this trajectory."""
    columns = (f.completion_id, f.source, f.reward, f.parts, f.comment, f.rewards)
    query = select(*columns).where(f.project == project, f.id.in_(ids)).order_by(f.created_at, f.id)
    return [
        FeedbackPayload(
            row.completion_id, row.source, (row.rewards or {}).get(trajectory.id, row.reward), row.parts, row.comment
        )
        for row in connection.execute(query)
    ]
