"""The dashboard's SQL for comparisons: the recorded call that is asked again, and the answers as they come."""

from collections import Counter
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from proxy.dashboard.queries.newest import newest
from whetstone.transfer.exporting.rows import CHAT, Completion

MOST_TURNS = 200
"""Most turns of a conversation that is asked again."""
USUAL = 50
"""Newest chats of a policy whose sampling fields a comparison takes."""
USUAL_S = 0.04
"""How long to look for them."""
_NEEDED = [field.name for field in fields(Completion) if field.default is MISSING]
"""All but the token ids and their logprobs."""

c, t = schema.completions.c, schema.trajectories.c


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call, with all turns of its trajectory up to it, by id."""

    completion: Completion
    by_id: dict[str, Completion]
    sampling: dict[str, Any] | None
    end_user: str | None
    task: str | None


def recorded_call(connection: Connection, project: str, trajectory_id: str, turn: int | None) -> RecordedCall | None:
    """Return the call of this turn, of the last one if it is None; None if the project has none."""
    of_trajectory = [c.project == project, c.trajectory_id == trajectory_id]
    up_to = [] if turn is None else [c.turn <= turn]
    columns = [c[name] for name in _NEEDED]
    query = select(*columns, c.sampling, c.end_user, t.task).join(
        schema.trajectories, (t.project == c.project) & (t.id == c.trajectory_id)
    )
    rows = list(connection.execute(query.where(*of_trajectory, *up_to).order_by(c.turn.desc()).limit(MOST_TURNS)))
    if not rows or (turn is not None and rows[0].turn != turn):
        return None
    by_id = {row.id: Completion(**{name: row._mapping[name] for name in _NEEDED}) for row in rows}
    last = rows[0]
    return RecordedCall(by_id[last.id], by_id, last.sampling, last.end_user, last.task)


def usual_sampling(connection: Connection, project: str, policy: str) -> dict[str, float | None]:
    """Return the `temperature` and `max_tokens` that most of the policy's newest chats had, None where they had none;
    empty if there are no chats. Answers of comparisons do not count."""
    chats = [c.policy == policy, c.endpoint == CHAT, c.trajectory_id.not_like("compare-%")]
    columns = (c.sampling, c.created_at, c.id)
    page = newest(connection, schema.completions, columns, [c.project == project], chats, None, USUAL, USUAL_S)
    pairs = Counter(
        (_number(sent.get("temperature")), _number(sent.get("max_completion_tokens", sent.get("max_tokens"))))
        for row in page.rows
        for sent in [row["sampling"] or {}]
    )
    return dict(zip(("temperature", "max_tokens"), pairs.most_common(1)[0][0], strict=True)) if pairs else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def place_of(connection: Connection, project: str, completion_id: str) -> tuple[str, int] | None:
    """Return the trajectory and the turn of a completion; None if the project has none with that id."""
    row = connection.execute(select(c.trajectory_id, c.turn).where(c.project == project, c.id == completion_id)).first()
    return None if row is None else (row.trajectory_id, row.turn)


def answers(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the first answers of these trajectories, by trajectory."""
    query = (
        select(
            c.trajectory_id, c.id, c.policy, c.policy_version, c.status, c.error, c.response, c.response_text,
            c.new_messages, c.finish_reason, c.completion_tokens, c.total_ms, c.redactions, t.reward, t.state,
            t.metadata,
        )
        .join(schema.trajectories, (t.project == c.project) & (t.id == c.trajectory_id))
        .where(c.project == project, c.trajectory_id.in_(trajectory_ids), c.turn == 0)
    )  # fmt: skip
    return {row.trajectory_id: dict(row._mapping) for row in connection.execute(query)}
