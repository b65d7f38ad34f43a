"""Turn a log's conversations into rows: which trajectory each belongs to, and which completions it adds.

Which conversation continues which is found by the hashes that the proxy uses for continuations. `store` reads the
existing rows before, and writes the result after.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from whetstone.domain.conversation_hash import HASH_BYTES, MessageReader, Turn, canonical, lookup_keys
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.transfer.importing.schema import LogEntry, Message

IMPORTED = WhyNotTrained.IMPORTED.value
"""Also stored as the source of their reward, and as the reason why their groups are not trained on."""


class ConversationHashes(msgspec.Struct, frozen=True, gc=False):
    """The hashes of a conversation of a log, message by message."""

    turns: Sequence[Turn]
    exact: Sequence[bytes]
    """For each message, the hash of the conversation up to and including it, with all text that `proxy.normalise`
    matches: what is imported must not depend on that setting."""


class Histories:
    """Reads conversations of a log."""

    def __init__(self, patterns: Sequence[str] = (), timeout_s: float = 0.05) -> None:
        """`patterns`: the setting `proxy.normalise`."""
        self._reader = MessageReader(patterns, timeout_s)
        self._exact = MessageReader() if patterns else self._reader

    def of(self, entry: LogEntry) -> ConversationHashes:
        """Hash a line's conversation. It belongs to its end user: an imported call has no key, and other callers do not
        find it."""
        messages = entry.messages if entry.as_logged is None else entry.as_logged
        turns = self._reader.turns(messages, entry.tags.end_user)
        exact = turns if self._exact is self._reader else self._exact.turns(messages, None)
        return ConversationHashes(turns, [turn.whole for turn in exact])


def digest(*parts: Any) -> str:
    """Return 32 hex digits, the hash of values that JSON can represent."""
    return hashlib.blake2b(canonical(parts), digest_size=HASH_BYTES, person=b"whetstone import").hexdigest()


@dataclass(frozen=True, slots=True)
class KeyedEntry:
    """A conversation to import."""

    place: int
    """Number of its line."""
    key: str
    """Distinguishes it from others with the same text: the same log produces the same keys."""
    entry: LogEntry


@dataclass(slots=True)
class PendingTrajectory:
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
    trajectories: dict[str, PendingTrajectory] = field(default_factory=dict)
    completions: set[str] = field(default_factory=set)
    """Ids that exist already."""
    heads: dict[bytes, list[tuple[str, str]]] = field(default_factory=dict)
    """Continuation keys of completions, by conversation and by tool calls -> ids of completion and trajectory, the
    oldest first."""
    taken: set[str] = field(default_factory=set)
    """Completions that have a continuation."""
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """New completions, by id."""
    continued: dict[str, str] = field(default_factory=dict)
    """Existing completion -> the completion that continues it."""
    counted: Counter[str] = field(default_factory=Counter)


def place(chunk: Chunk, keyed: KeyedEntry, hashes: ConversationHashes) -> None:
    """Assign a conversation to a trajectory and add its completions, unless they exist already."""
    entry, tags = keyed.entry, keyed.entry.tags
    completion_id = f"imported-{keyed.key}" + (f".{entry.choice}" if entry.choice else "")
    if entry.is_call and completion_id in chunk.completions:
        chunk.counted["there"] += 1
        return
    if tags.trajectory_id is None:
        trajectory_id, extends, continues, by = _find_trajectory(chunk, keyed, hashes, completion_id)
    else:
        trajectory_id = f"{tags.trajectory_id}.{entry.choice}" if entry.choice else tags.trajectory_id
        extends, continues, by = None, None, "metadata"
    pending = chunk.trajectories.get(trajectory_id)
    if pending is not None and not pending.ours:
        chunk.counted["taken"] += 1
        return
    before = len(chunk.rows)
    if pending is None:
        row = _trajectory(chunk, keyed, trajectory_id, continues)
        pending = chunk.trajectories[trajectory_id] = PendingTrajectory(0, 0, None, row=row)
    at = _find_followed(chunk, trajectory_id, hashes, entry.answers[0]) if entry.is_call else None
    extends = extends or (at and at[1])
    for answer in entry.answers:
        its_id = completion_id if entry.is_call else f"imported-{digest(trajectory_id, hashes.exact[answer].hex())}"
        if its_id not in chunk.completions:
            _add(chunk, keyed, (trajectory_id, pending), its_id, answer, at, extends, hashes.turns[answer], by)
        at, extends = (answer, its_id), its_id
    if len(chunk.rows) == before:
        chunk.counted["there"] += 1
    elif tags.reward is not None:
        pending.reward, pending.changed = tags.reward, True


def _find_trajectory(
    chunk: Chunk, keyed: KeyedEntry, hashes: ConversationHashes, own: str
) -> tuple[str, str | None, str | None, str]:
    """Find the trajectory of a conversation without a trajectory id. Return its id; the completion in it that it
    extends, or the completion elsewhere that a new trajectory continues; and the rule that matched."""
    entry = keyed.entry
    if not entry.is_call:
        return own, None, None, "new"
    before = hashes.turns[: entry.answers[0]]
    history = next((one for one in lookup_keys(before) if one in chunk.heads), None)
    if history is None:
        return own, None, None, "new"
    heads = chunk.heads[history]
    free = next((head for head in heads if head[0] not in chunk.taken), None)
    if free is None or entry.choice:
        return own, None, heads[0][0], "fork"
    by_tool_calls = any(turn.tool_history == history for turn in before)
    return free[1], free[0], None, "tool_calls" if by_tool_calls else "content"


def _find_followed(chunk: Chunk, trajectory_id: str, hashes: ConversationHashes, until: int) -> tuple[int, str] | None:
    """Return the completion of this trajectory whose conversation a call repeats, and the position of its answer.

    A following completion is stored without the messages of the one that it follows. So the messages must be equal even
    without `proxy.normalise`.
    """
    for place in range(until - 1, -1, -1):
        turn = hashes.turns[place]
        # Turns are equal to the exact ones where no text was left out of the hash.
        if turn.history is not None and turn.whole == hashes.exact[place]:
            for completion_id, its in chunk.heads.get(turn.history, ()):
                if its == trajectory_id and completion_id not in chunk.taken:
                    return place, completion_id
    return None


def _add(
    chunk: Chunk,
    keyed: KeyedEntry,
    to: tuple[str, PendingTrajectory],
    completion_id: str,
    answer: int,
    at: tuple[int, str] | None,
    extends: str | None,
    turn: Turn,
    by: str,
) -> None:
    """Add the row of an answer. `at`: position in the conversation of the answer that it follows, and that completion's
    id. `extends`: the completion that it continues, whether or not its messages are repeated."""
    entry, (trajectory_id, pending) = keyed.entry, to
    message, follows = entry.messages[answer], at and at[1]
    created_at = entry.tags.created_at or chunk.now
    chunk.rows[completion_id] = {
        "project": chunk.project,
        "id": completion_id,
        "upstream_id": entry.response_id or f"chatcmpl-{completion_id}",
        "call_id": f"imported-{keyed.key}" if entry.is_call else completion_id,
        "choice": entry.choice,
        "trajectory_id": trajectory_id,
        "turn": pending.completions,
        "policy": chunk.policy,
        "policy_version": 0,
        "endpoint": "chat.completions",
        "streamed": False,
        "status": "complete",
        "follows": follows,
        "end_user": entry.tags.end_user,
        "new_messages": list(entry.messages[at[0] + 1 if at else 0 : answer]),
        # In a completion that follows another, NULL means "unchanged".
        "tools": None if follows else entry.tools,
        "response": message,
        "response_text": _text_of_parts(message),
        "sampling": dict(entry.sampling) or None,
        "finish_reason": entry.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop"),
        "prompt_tokens": entry.prompt_tokens,
        "completion_tokens": entry.completion_tokens,
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
    pending.completions += 1
    pending.sampled_tokens += entry.completion_tokens or 0
    pending.tail, pending.changed = completion_id, True
    pending.last_seen_at = max(pending.last_seen_at or created_at, created_at)


def _trajectory(chunk: Chunk, keyed: KeyedEntry, trajectory_id: str, continues: str | None) -> dict[str, Any]:
    tags = keyed.entry.tags
    created_at = tags.created_at or chunk.now
    return {
        "project": chunk.project,
        "id": trajectory_id,
        "group_id": tags.group_id or (f"imported-{keyed.key}.choices" if keyed.entry.choices > 1 else None),
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
        # It needs no group.
        "placed_at": chunk.now,
        "continues": continues,
        "end_user": tags.end_user,
    }


def figures(pending: PendingTrajectory) -> dict[str, Any]:
    """Return the totals of a trajectory's turns, and its reward, which an existing trajectory keeps unless a line gave
    one."""
    seen_at = pending.last_seen_at
    reward = {"reward": pending.reward, "reward_source": None if pending.reward is None else IMPORTED}
    return {
        "completions": pending.completions,
        "sampled_tokens": pending.sampled_tokens,
        "tail_completion_id": pending.tail,
        **({} if pending.row is None or seen_at is None else {"last_seen_at": seen_at, "ended_at": seen_at}),
        **({} if pending.row is None and pending.reward is None else reward),
    }


def _text_of_parts(message: Message) -> str | None:
    """Return the text of a message that consists of parts; None for any other, whose content is its text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))
