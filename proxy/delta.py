"""What a turn adds to the one before: a conversation's growing prefix is stored once. Pure; knows no table."""

from array import array
from collections.abc import Sequence
from functools import lru_cache

import msgspec

ANSWER = msgspec.Raw(b"")
"""Stands for an echoed answer that nobody has as the app wrote it down."""
LARGEST_KNOWN = 32 * 1024
"""Tools up to this size are remembered once they were read, in bytes."""

_copy, _decode, _encode = msgspec.Raw.copy, msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
_sorted = msgspec.json.Encoder(order="deterministic").encode


def packed(token_ids: Sequence[int]) -> "array[int]":
    """Token ids in 4 bytes each: as a list they take ten times as much, and thousands of tails are kept."""
    return array("i", token_ids)


_NONE = packed(())


class Tail(msgspec.Struct, frozen=True):
    """Where a trajectory stands after its last completion: what a next turn may extend."""

    completion_id: str
    token_ids: "array[int]"
    """The whole prompt and the answer."""
    messages: list[msgspec.Raw]
    """Those of the request; its own answer is not there."""
    answers: tuple[int, ...]
    """Places of those that echo an earlier answer: however the app wrote it down, its token ids were compared."""
    tools: bytes | None


class Asked(msgspec.Struct):
    """A request's messages, which are read only where their bytes do not tell."""

    messages: list[msgspec.Raw]
    _told: bytes | None = None
    _start: int = 0
    """From which message on they were told."""
    _own: list[msgspec.Raw] | None = None
    _known: list[msgspec.Raw] = []
    """Those with which a tail begins, byte for byte."""

    def told(self, start: int = 0) -> bytes:
        """The messages from that one on, read and told compactly."""
        told = self._told
        if told is None or start != self._start:
            left = self.messages[start:] if start else self.messages
            told = self._told = _encode(list(map(_decode, left)))
            self._start = start
        return told

    def own(self) -> list[msgspec.Raw]:
        """The messages, each by itself: as they came, they keep all of the request in memory."""
        own = self._own
        if own is None:
            known = self._known
            own = self._own = [*known, *map(_copy, self.messages[len(known) :])]
        return own

    def begins_with(self, tail: Tail) -> bool:
        """Whether its messages go on from the tail's, whatever stands for the answers in between."""
        # Most apps send the same bytes again.
        if self.messages[: len(tail.messages)] == tail.messages:
            self._known = tail.messages
            return True
        pairs = enumerate(zip(tail.messages, self.messages, strict=False))
        return all(place in tail.answers or same(known, ours) for place, (known, ours) in pairs)


class Added(msgspec.Struct, frozen=True):
    """What is stored of a turn."""

    follows: str | None
    messages: Sequence[msgspec.Raw]
    prompt_token_ids: list[int] | None
    tools: msgspec.Raw | None
    told: bytes
    """The messages, compactly."""
    asked: Asked
    """All messages, for the tail this turn leaves."""
    answers: tuple[int, ...] = ()
    """Places of answers among them."""
    known_token_ids: "array[int]" = _NONE
    """Those of the tail that it follows."""


def same(one: msgspec.Raw, other: msgspec.Raw) -> bool:
    """Whether messages differ in nothing but white space or the order of keys."""
    return one == other or _canonical_of(one) == _canonical_of(other)


def added(tail: Tail | None, asked: Asked, prompt_token_ids: list[int] | None, tools: msgspec.Raw | None) -> Added:
    """Compare a request with the tail of its trajectory.

    It follows the tail where its prompt begins with the tail's very ids and its messages with the tail's messages and
    one answer; then only what comes after is stored. Otherwise all of it is, and it follows nothing.
    """
    if (
        tail is not None
        and prompt_token_ids is not None
        and len(tail.token_ids) <= len(prompt_token_ids)
        and len(tail.messages) < len(asked.messages)
        and not (tools is None and tail.tools is not None)  # NULL in SQL means "as before", not "no more"
        and packed(prompt_token_ids[: len(tail.token_ids)]) == tail.token_ids
        and asked.begins_with(tail)
    ):
        answered = len(tail.messages)
        return Added(
            tail.completion_id,
            asked.messages[answered + 1 :],
            prompt_token_ids[len(tail.token_ids) :],
            None if tools is not None and canonical(tools) == tail.tools else tools,
            asked.told(answered + 1),
            asked,
            (*tail.answers, answered),
            tail.token_ids,
        )
    return Added(None, asked.messages, prompt_token_ids, tools, asked.told(), asked)


def tail_of(completion_id: str, new: Added, token_ids: list[int] | None, tools: msgspec.Raw | None) -> Tail | None:
    """The tail a completion leaves; None where its ids are unknown and nothing can follow it."""
    if new.prompt_token_ids is None or token_ids is None:
        return None
    whole = new.known_token_ids + packed(new.prompt_token_ids + token_ids)
    told = None if tools is None else canonical(tools)
    return Tail(completion_id, whole, new.asked.own(), new.answers, told)


def canonical(raw: msgspec.Raw) -> bytes:
    """The same for tools that differ in nothing but white space or the order of keys; the latest are remembered."""
    return _canonical_known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else _canonical_of(raw)


def _canonical_of(raw: msgspec.Raw | bytes) -> bytes:
    return _sorted(msgspec.json.decode(raw))


# An agent sends the same tools with every request.
_canonical_known = lru_cache(64)(_canonical_of)
