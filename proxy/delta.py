"""What a turn adds to the one before: a conversation's growing prefix is stored once. Pure; knows no table."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

ANSWER = b""
"""Stands for an echoed answer: however the app wrote it down, its token ids were compared."""
LARGEST_KNOWN = 32 * 1024
"""Tools up to this size are remembered once they were read, in bytes."""

_sorted = msgspec.json.Encoder(order="deterministic").encode


class Tail(msgspec.Struct, frozen=True):
    """Where a trajectory stands after its last completion: what a next turn may extend."""

    completion_id: str
    token_ids: list[int]
    """The whole prompt and the answer."""
    digests: list[bytes]
    """One per message of the request, ANSWER where it echoes an earlier answer; its own answer is not there."""
    tools: bytes | None
    asked: bytes = b""
    """Hash of the request's messages as they came: most apps send the same bytes again. Empty where nobody has them."""


class Asked:
    """A request's messages, which are read only where their bytes do not tell."""

    __slots__ = ("_hash", "_hashed", "_said", "messages")

    def __init__(self, messages: Sequence[msgspec.Raw]) -> None:
        self.messages = messages
        self._said: dict[int, tuple[list[Any], list[bytes]]] = {}
        self._hash, self._hashed = hashlib.blake2b(digest_size=16), 0

    def said(self, start: int = 0) -> tuple[list[Any], list[bytes]]:
        """The messages from that one on, read, and their digests."""
        known = self._said.get(start)
        if known is None:
            read = [msgspec.json.decode(message) for message in self.messages[start:]]
            known = self._said[start] = read, [_digest(message) for message in read]
        return known

    def begins_with(self, tail: Tail) -> bool:
        """Whether its messages go on from the tail's, whatever stands for the answers in between."""
        if tail.asked and self.hash_of(len(tail.digests)) == tail.asked:
            return True
        _, digests = self.said()
        return all(known in (ANSWER, ours) for known, ours in zip(tail.digests, digests, strict=False))

    def hash_of(self, count: int) -> bytes:
        """Of so many messages from the first, as they came; who asks for fewer than were asked for is told of these."""
        if count > self._hashed:
            # A comma behind each, wherever it was left off.
            self._hash.update(b",".join((*self.messages[self._hashed : count], b"")))
            self._hashed = count
        return self._hash.digest()


class Added(msgspec.Struct, frozen=True):
    """What is stored of a turn."""

    follows: str | None
    messages: Sequence[msgspec.Raw]
    prompt_token_ids: list[int] | None
    tools: msgspec.Raw | None
    digests: list[bytes]
    """For the tail this turn leaves."""
    said: list[Any]
    """The messages, read."""


def digest(message: msgspec.Raw) -> bytes:
    """The same for messages that differ only in white space or the order of keys."""
    return _digest(msgspec.json.decode(message))


def _digest(message: Any) -> bytes:
    return hashlib.blake2b(_sorted(message), digest_size=16).digest()


def added(tail: Tail | None, asked: Asked, prompt_token_ids: list[int] | None, tools: msgspec.Raw | None) -> Added:
    """Compare a request with the tail of its trajectory.

    It follows the tail where its prompt begins with the tail's very ids and its messages with the tail's messages and
    one answer; then only what comes after is stored. Otherwise all of it is, and it follows nothing.
    """
    if (
        tail is not None
        and prompt_token_ids is not None
        and len(tail.token_ids) <= len(prompt_token_ids)
        and len(tail.digests) < len(asked.messages)
        and not (tools is None and tail.tools is not None)  # NULL in SQL means "as before", not "no more"
        and prompt_token_ids[: len(tail.token_ids)] == tail.token_ids
        and asked.begins_with(tail)
    ):
        answered = len(tail.digests)
        said, digests = asked.said(answered + 1)
        return Added(
            tail.completion_id,
            asked.messages[answered + 1 :],
            prompt_token_ids[len(tail.token_ids) :],
            None if tools is not None and _canonical(tools) == tail.tools else tools,
            [*tail.digests, ANSWER, *digests],
            said,
        )
    said, digests = asked.said()
    return Added(None, asked.messages, prompt_token_ids, tools, digests, said)


def tail_of(
    completion_id: str,
    digests: list[bytes],
    prompt_token_ids: list[int] | None,
    token_ids: list[int] | None,
    tools: msgspec.Raw | None,
    asked: bytes = b"",
) -> Tail | None:
    """The tail a completion leaves; None where its ids are unknown and nothing can follow it."""
    if prompt_token_ids is None or token_ids is None:
        return None
    return Tail(
        completion_id=completion_id,
        token_ids=prompt_token_ids + token_ids,
        digests=digests,
        tools=None if tools is None else _canonical(tools),
        asked=asked,
    )


def _canonical(raw: msgspec.Raw) -> bytes:
    return _canonical_known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else _canonical_of(raw)


def _canonical_of(raw: msgspec.Raw | bytes) -> bytes:
    return _sorted(msgspec.json.decode(raw))


# An agent sends the same tools with every request.
_canonical_known = lru_cache(64)(_canonical_of)
