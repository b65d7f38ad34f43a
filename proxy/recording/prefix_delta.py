"""Compute what a turn adds to the previous one, so that a conversation's growing prefix is stored once.

The tail of a trajectory is its last state, which a next turn may extend: from memory, or read back along `follows`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from proxy.domain.json_values import canonical, encode_sorted
from proxy.recording.turn_store import turns_to

MAX_TAILS = 4096
MAX_BYTES = 64_000_000
"""Most trajectories whose tail stays in memory (MAX_TAILS), and their total size (MAX_BYTES). Other tails are read from
the database when their trajectory continues."""
TOKEN_BYTES, MESSAGE_BYTES = 4, 100
"""Bytes of a token id, and of a message in addition to its text."""
ANSWER = msgspec.Raw(b"")
"""Stands for an echoed answer whose text, as the app sent it, is not stored."""

_copy, _decode, _encode = msgspec.Raw.copy, msgspec.json.Decoder().decode, msgspec.json.Encoder().encode


def packed(token_ids: Sequence[int]) -> "array[int]":
    """Pack token ids into 4 bytes each: a list takes ten times as much, and thousands of tails stay in memory."""
    return array("i", token_ids)


_NONE = packed(())


class Tail(msgspec.Struct, frozen=True):
    """The state of a trajectory after its last completion, which a next turn may extend."""

    completion_id: str
    token_ids: "array[int]"
    """The token ids of the whole prompt and the answer."""
    messages: list[msgspec.Raw]
    """The messages of the request, without its own answer."""
    answers: tuple[int, ...]
    """Indexes of the messages that echo an earlier answer. Their text is not compared, because their token ids are."""
    tools: bytes | None


class RequestMessages(msgspec.Struct):
    """A request's messages. They are decoded only where a comparison of bytes is not enough."""

    messages: list[msgspec.Raw]
    _json: bytes | None = None
    _start: int = 0
    """Index of the first message in `_json`."""
    _own: list[msgspec.Raw] | None = None
    _known: list[msgspec.Raw] = []
    """The messages that are equal to a tail's, byte for byte."""

    def as_json(self, start: int = 0) -> bytes:
        """Return the messages from `start` on, as compact JSON."""
        encoded = self._json
        if encoded is None or start != self._start:
            encoded = self._json = _encode(list(map(_decode, self.messages[start:])))
            self._start = start
        return encoded

    def own(self) -> list[msgspec.Raw]:
        """Return the messages as copies: the originals would keep the whole request in memory."""
        own = self._own
        if own is None:
            known = self._known
            own = self._own = [*known, *map(_copy, self.messages[len(known) :])]
        return own

    def begins_with(self, tail: Tail) -> bool:
        """Return whether its messages begin with the tail's. The echoed answers among them are not compared."""
        # Most apps send the same bytes again.
        if self.messages[: len(tail.messages)] == tail.messages:
            self._known = tail.messages
            return True
        pairs = enumerate(zip(tail.messages, self.messages, strict=False))
        return all(place in tail.answers or same(known, ours) for place, (known, ours) in pairs)


class TurnDelta(msgspec.Struct, frozen=True):
    """What is stored of a turn."""

    follows: str | None
    messages: Sequence[msgspec.Raw]
    prompt_token_ids: list[int] | None
    tools: msgspec.Raw | None
    messages_json: bytes
    """The messages as compact JSON."""
    request: RequestMessages
    """All messages, for the tail that this turn leaves."""
    answers: tuple[int, ...] = ()
    """Indexes of the answers among them."""
    known_token_ids: "array[int]" = _NONE
    """Token ids of the tail that it follows."""


def same(one: msgspec.Raw, other: msgspec.Raw) -> bool:
    """Return whether two messages are equal except for white space, key order and `cache_control`: Anthropic's clients
    mark the last message of each request, and no model sees the marks."""
    return one == other or _unmarked(one) == _unmarked(other)


def _unmarked(message: msgspec.Raw) -> bytes:
    value = _decode(message)
    content = value.get("content") if isinstance(value, dict) else None
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            part.pop("cache_control", None)
    return encode_sorted(value)


def turn_delta(
    tail: Tail | None, request: RequestMessages, prompt_token_ids: list[int] | None, tools: msgspec.Raw | None
) -> TurnDelta:
    """Compare a request with the tail of its trajectory.

    The request follows the tail if its prompt begins with exactly the tail's token ids, and its messages with the
    tail's messages and one answer. Then only the rest is stored. Otherwise everything is stored, and the turn follows
    nothing.
    """
    if (
        tail is not None
        and prompt_token_ids is not None
        and len(tail.token_ids) <= len(prompt_token_ids)
        and len(tail.messages) < len(request.messages)
        and not (tools is None and tail.tools is not None)  # NULL in SQL means "as before", not "no more"
        and packed(prompt_token_ids[: len(tail.token_ids)]) == tail.token_ids
        and request.begins_with(tail)
    ):
        answered = len(tail.messages)
        return TurnDelta(
            tail.completion_id,
            request.messages[answered + 1 :],
            prompt_token_ids[len(tail.token_ids) :],
            None if tools is not None and canonical(tools) == tail.tools else tools,
            request.as_json(answered + 1),
            request,
            (*tail.answers, answered),
            tail.token_ids,
        )
    return TurnDelta(None, request.messages, prompt_token_ids, tools, request.as_json(), request)


def tail_of(completion_id: str, new: TurnDelta, token_ids: list[int] | None, tools: msgspec.Raw | None) -> Tail | None:
    """Return the tail that a completion leaves; None if its token ids are unknown, so that nothing can follow it."""
    if new.prompt_token_ids is None or token_ids is None:
        return None
    whole = new.known_token_ids + packed(new.prompt_token_ids + token_ids)
    return Tail(completion_id, whole, new.request.own(), new.answers, None if tools is None else canonical(tools))


class Tails:
    """The tails of the trajectories that were written last."""

    def __init__(self) -> None:
        self._tails: OrderedDict[tuple[str, str], tuple[Tail, int]] = OrderedDict()
        """Each with its size in bytes."""
        self._bytes = 0

    def knows(self, project: str, trajectory_id: str) -> bool:
        """Return whether that trajectory was written recently: most likely it still exists."""
        return (project, trajectory_id) in self._tails

    def keep(self, project: str, trajectory_id: str, tail: Tail | None) -> None:
        """Store the tail of a trajectory; None: nothing can follow it."""
        tails, key = self._tails, (project, trajectory_id)
        if (before := tails.pop(key, None)) is not None:
            self._bytes -= before[1]
        if tail is not None:
            messages = tail.messages
            size = TOKEN_BYTES * len(tail.token_ids) + MESSAGE_BYTES * len(messages) + sum(map(len, messages))
            tails[key] = tail, size
            self._bytes += size
        while len(tails) > MAX_TAILS or self._bytes > MAX_BYTES:
            self._bytes -= tails.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Drop all tails: some may be from a transaction that did not commit."""
        self._tails.clear()
        self._bytes = 0

    def of(self, connection: Connection, project: str, trajectory_id: str, tail_id: str | None) -> Tail | None:
        """Return the trajectory's tail, which is the completion `tail_id`; None if nothing can follow it."""
        if tail_id is None:
            return None
        known, _ = self._tails.get((project, trajectory_id), (None, 0))
        return known if known is not None and known.completion_id == tail_id else _read(connection, project, tail_id)


def _read(connection: Connection, project: str, tail_id: str) -> Tail | None:
    token_ids: list[int] = []
    messages: list[msgspec.Raw] = []
    answers: list[int] = []
    tools = None
    for row in turns_to(connection, project, tail_id):
        if row.prompt_token_ids is None or row.token_ids is None:
            return None
        if token_ids:
            answers.append(len(messages))
            messages.append(ANSWER)
        token_ids += row.prompt_token_ids + row.token_ids
        messages += [msgspec.Raw(_encode(message)) for message in row.new_messages or ()]
        tools = tools if row.tools is None else row.tools
    return Tail(tail_id, packed(token_ids), messages, tuple(answers), None if tools is None else encode_sorted(tools))
