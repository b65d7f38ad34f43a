"""What a turn adds to the one before: a conversation's growing prefix is stored once. Pure; knows no table."""

import hashlib
from collections.abc import Sequence

import msgspec

ANSWER = b""
"""Stands for an echoed answer: however the app wrote it down, its token ids were compared."""


class Tail(msgspec.Struct, frozen=True):
    """Where a trajectory stands after its last completion: what a next turn may extend."""

    completion_id: str
    token_ids: list[int]
    """The whole prompt and the answer."""
    digests: list[bytes]
    """One per message of the request, ANSWER where it echoes an earlier answer; its own answer is not there."""
    tools: bytes | None


class Added(msgspec.Struct, frozen=True):
    """What is stored of a turn."""

    follows: str | None
    messages: list[msgspec.Raw]
    prompt_token_ids: list[int] | None
    tools: msgspec.Raw | None
    digests: list[bytes]
    """For the tail this turn leaves."""


def digest(message: msgspec.Raw) -> bytes:
    """The same for messages that differ only in white space or the order of keys."""
    canonical = msgspec.json.encode(msgspec.json.decode(message), order="deterministic")
    return hashlib.blake2b(canonical, digest_size=16).digest()


def added(
    tail: Tail | None,
    messages: list[msgspec.Raw],
    digests: Sequence[bytes],
    prompt_token_ids: list[int] | None,
    tools: msgspec.Raw | None,
) -> Added:
    """Compare a request with the tail of its trajectory.

    It follows the tail where its prompt begins with the tail's very ids and its messages with the tail's messages and
    one answer; then only what comes after is stored. Otherwise all of it is, and it follows nothing.
    """
    if (
        tail is not None
        and prompt_token_ids is not None
        and len(tail.token_ids) <= len(prompt_token_ids)
        and len(tail.digests) < len(digests)
        and not (tools is None and tail.tools is not None)  # NULL in SQL means "as before", not "no more"
        and prompt_token_ids[: len(tail.token_ids)] == tail.token_ids
        and all(known in (ANSWER, new) for known, new in zip(tail.digests, digests, strict=False))
    ):
        answered = len(tail.digests)
        return Added(
            follows=tail.completion_id,
            messages=messages[answered + 1 :],
            prompt_token_ids=prompt_token_ids[len(tail.token_ids) :],
            tools=None if tools is not None and _canonical(tools) == tail.tools else tools,
            digests=[*tail.digests, ANSWER, *digests[answered + 1 :]],
        )
    return Added(follows=None, messages=messages, prompt_token_ids=prompt_token_ids, tools=tools, digests=list(digests))


def tail_of(
    completion_id: str,
    digests: list[bytes],
    prompt_token_ids: list[int] | None,
    token_ids: list[int] | None,
    tools: msgspec.Raw | None,
) -> Tail | None:
    """The tail a completion leaves; None where its ids are unknown and nothing can follow it."""
    if prompt_token_ids is None or token_ids is None:
        return None
    return Tail(
        completion_id=completion_id,
        token_ids=prompt_token_ids + token_ids,
        digests=digests,
        tools=None if tools is None else _canonical(tools),
    )


def _canonical(raw: msgspec.Raw) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(raw), order="deterministic")
