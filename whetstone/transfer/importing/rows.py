"""Turn a log's conversations into rows: which trajectory each belongs to, and which completions it adds.

`store` reads the existing rows before, and writes the result after.
"""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from whetstone.domain.conversation_hash import Turn
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.transfer.importing.schema import Logged, Message
from whetstone.transfer.importing.threads import Read, digest

IMPORTED = WhyNotTrained.IMPORTED.value
"""Also stored as the source of their reward, and as the reason why their groups are not trained on."""


@dataclass(frozen=True, slots=True)
class One:
    """A conversation to import."""

    place: int
    """Number of its line."""
    key: str
    """Distinguishes it from others with the same text: the same log produces the same keys."""
    logged: Logged


@dataclass(slots=True)
class Standing:
    """A trajectory, with what will be written to it."""

    completions: int
    sampled_tokens: int
    tail: str | None
    ours: bool = True
    """It was imported. Trajectories that apps made are never extended."""
    row: dict[str, Any] | None = None
    """Its new row, if the trajectory begins in this chunk."""
    changed: bool = False
    reward: float | None = None
    last_seen_at: datetime | None = None


@dataclass(slots=True)
class Chunk:
    """The existing and the new rows of some conversations."""

    project: str
    policy: str
    now: datetime
    trajectories: dict[str, Standing] = field(default_factory=dict)
    completions: set[str] = field(default_factory=set)
    """Ids that exist already."""
    heads: dict[bytes, list[tuple[str, str]]] = field(default_factory=dict)
    """Keys by which completions are found, by conversation and by tool calls -> ids of completion and trajectory, the
    oldest first."""
    taken: set[str] = field(default_factory=set)
    """Completions that have a continuation."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """New completions, by id."""
    continued: dict[str, str] = field(default_factory=dict)
    """Existing completion -> the completion that continues it."""
    counted: Counter[str] = field(default_factory=Counter)


def place(chunk: Chunk, one: One, read: Read) -> None:
    """Assign a conversation to a trajectory and add its completions, unless they exist already."""
    logged, tags = one.logged, one.logged.tags
    first = f"imported-{one.key}"
    completion_id = f"{first}.{logged.choice}" if logged.choice else first
    if logged.is_call and completion_id in chunk.completions:
        chunk.counted["there"] += 1
        return
    extends, continues, by = None, None, "metadata"
    trajectory_id = tags.trajectory_id
    if trajectory_id is not None and logged.choice:
        trajectory_id = f"{trajectory_id}.{logged.choice}"
    if trajectory_id is None:
        trajectory_id, extends, continues, by = _found(chunk, one, read, completion_id)
    standing = chunk.trajectories.get(trajectory_id)
    if standing is not None and not standing.ours:
        chunk.counted["taken"] += 1
        return
    before = len(chunk.rows)
    if standing is None:
        row = _trajectory(chunk, one, trajectory_id, continues)
        standing = chunk.trajectories[trajectory_id] = Standing(0, 0, None, row=row)
    at: tuple[int, str] | None = None
    if logged.is_call:
        at = _followed(chunk, trajectory_id, read, logged.answers[0])
        extends = extends or (at and at[1])
    for answer in logged.answers:
        its_id = completion_id if logged.is_call else f"imported-{digest(trajectory_id, read.exact[answer].hex())}"
        if its_id not in chunk.completions:
            _add(chunk, one, (trajectory_id, standing), its_id, answer, at, extends, read.turns[answer], by)
        at, extends = (answer, its_id), its_id
    if len(chunk.rows) == before:
        chunk.counted["there"] += 1
    elif tags.reward is not None:
        standing.reward, standing.changed = tags.reward, True


def _found(chunk: Chunk, one: One, read: Read, own: str) -> tuple[str, str | None, str | None, str]:
    """Find the trajectory of a conversation without a trajectory id. Return its id; the completion in it that it
    extends, or the completion elsewhere that a new trajectory continues; and the rule that matched."""
    logged = one.logged
    if not logged.is_call:
        return f"imported-{one.key}", None, None, "new"
    histories = read.found_by(logged.answers[0])
    by_tool_calls = read.tool_calls(logged.answers[0])
    for history in histories:
        heads = chunk.heads.get(history, ())
        if not heads:
            continue
        free = next((head for head in heads if head[0] not in chunk.taken), None)
        if free is not None and not logged.choice:
            return free[1], free[0], None, "tool_calls" if history == by_tool_calls else "content"
        return own, None, heads[0][0], "fork"
    return own, None, None, "new"


def _followed(chunk: Chunk, trajectory_id: str, read: Read, until: int) -> tuple[int, str] | None:
    """Return the completion of this trajectory whose conversation a call repeats, and the position of its answer.

    A following completion is stored without the messages of the one that it follows. So the messages must be equal even
    without `proxy.normalise`.
    """
    for place in range(until - 1, -1, -1):
        history = read.turns[place].history
        if history is None or not read.is_exact(place):
            continue
        for completion_id, its in chunk.heads.get(history, ()):
            if its == trajectory_id and completion_id not in chunk.taken:
                return place, completion_id
    return None


def _add(
    chunk: Chunk,
    one: One,
    to: tuple[str, Standing],
    completion_id: str,
    answer: int,
    at: tuple[int, str] | None,
    extends: str | None,
    turn: Turn,
    by: str,
) -> None:
    """Add the row of an answer. `at`: position in the conversation of the answer that it follows, and that completion's
    id. `extends`: the completion that it continues, whether or not its messages are repeated."""
    logged, (trajectory_id, standing) = one.logged, to
    message, follows = logged.messages[answer], at and at[1]
    created_at = logged.tags.created_at or chunk.now
    chunk.rows[completion_id] = {
        "project": chunk.project,
        "id": completion_id,
        "upstream_id": logged.response_id or f"chatcmpl-{completion_id}",
        "call_id": f"imported-{one.key}" if logged.is_call else completion_id,
        "choice": logged.choice,
        "trajectory_id": trajectory_id,
        "turn": standing.completions,
        "policy": chunk.policy,
        "policy_version": 0,
        "endpoint": "chat.completions",
        "streamed": False,
        "status": "complete",
        "follows": follows,
        "end_user": logged.tags.end_user,
        "new_messages": list(logged.messages[at[0] + 1 if at else 0 : answer]),
        # In a completion that follows another, NULL means "unchanged".
        "tools": None if follows else logged.tools,
        "response": message,
        "response_text": _text_of_parts(message),
        "sampling": dict(logged.sampling) or None,
        "finish_reason": logged.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop"),
        "prompt_tokens": logged.prompt_tokens,
        "completion_tokens": logged.completion_tokens,
        "threaded_by": by,
        "why_not_trained": IMPORTED,
        "created_at": created_at,
        "history": turn.history,
        "tool_history": turn.tool_history,
        "continued_by": None,
    }
    chunk.completions.add(completion_id)
    for history in (turn.history, turn.tool_history):
        if history is not None:
            chunk.heads.setdefault(history, []).append((completion_id, trajectory_id))
    if extends is not None and extends not in chunk.taken:
        chunk.taken.add(extends)
        if extends in chunk.rows:
            chunk.rows[extends]["continued_by"] = completion_id
        else:
            chunk.continued[extends] = completion_id
    standing.completions += 1
    standing.sampled_tokens += logged.completion_tokens or 0
    standing.tail, standing.changed = completion_id, True
    standing.last_seen_at = max(standing.last_seen_at or created_at, created_at)


def _trajectory(chunk: Chunk, one: One, trajectory_id: str, continues: str | None) -> dict[str, Any]:
    tags, logged = one.logged.tags, one.logged
    created_at = tags.created_at or chunk.now
    group_id = tags.group_id or (f"imported-{one.key}.choices" if logged.choices > 1 else None)
    return {
        "project": chunk.project,
        "id": trajectory_id,
        "group_id": group_id,
        "policy": chunk.policy,
        "task": tags.task,
        "split": tags.split,
        "no_train": tags.no_train,
        "state": "excluded",
        "first_version": 0,
        "last_version": 0,
        "completions": 0,
        "sampled_tokens": 0,
        "why_not_trained": IMPORTED,
        "metadata": dict(tags.metadata) if tags.metadata else None,
        "created_at": created_at,
        "last_seen_at": created_at,
        "ended_at": created_at,
        # No group has to be found for it.
        "placed_at": chunk.now,
        "continues": continues,
        "end_user": tags.end_user,
    }


def figures(standing: Standing) -> dict[str, Any]:
    """Return the totals of a trajectory's turns."""
    figures = {"completions": standing.completions, "sampled_tokens": standing.sampled_tokens}
    seen_at = standing.last_seen_at
    seen = {} if standing.row is None or seen_at is None else {"last_seen_at": seen_at, "ended_at": seen_at}
    return figures | {"tail_completion_id": standing.tail} | seen


def reward(standing: Standing) -> dict[str, Any]:
    """Return its reward, if a line gave one."""
    return {"reward": standing.reward, "reward_source": None if standing.reward is None else IMPORTED}


def _text_of_parts(message: Message) -> str | None:
    """Return the text of a message that consists of parts; None for any other, whose content is its text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))
