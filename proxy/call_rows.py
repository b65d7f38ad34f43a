"""A served call as rows of groups, trajectories and completions, in the form that `migrations.bulk` takes. Pure.

What apps and vLLM sent is read again and told compactly, so that plain SQL finds the same however it came; it was JSON,
so there is nothing in it that JSON has no words for.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from migrations.bulk import raw_json
from proxy.call import Call, Choice, nothing_said
from proxy.delta import Added, Asked
from proxy.storable import storable_json, storable_texts

LARGEST_KNOWN = 4096
"""Sampling fields and tools up to so many bytes are remembered: nearly all requests of an app have the same."""

Key = tuple[str, str]
"""Project and id."""


class Spoken(msgspec.Struct, frozen=True):
    """One choice of a call, on its way into the tables."""

    call: Call
    choice: Choice
    asked: Asked
    """The call's messages."""
    created_at: datetime
    group_id: str | None
    formed_by: str
    retry_of: str | None
    key: Key
    trajectory: Key

    @property
    def group(self) -> Key:
        """Which it is, where it has one."""
        return self.call.project, self.group_id or ""


def spoken(call: Call, retried: Mapping[int, str]) -> list[Spoken]:
    """What a call said, choice by choice; `retried`: the completions it repeats, by choice."""
    choices = call.choices or (nothing_said(0),)
    group_id, formed_by, project = call.address.group_id, "header", call.project
    if call.threaded_by in ("shadow", "evaluation"):
        formed_by = call.threaded_by
    elif group_id is None and len(choices) > 1:
        group_id, formed_by = f"{call.siblings}.choices", "choices"
    asked, created_at = Asked(call.messages), call.created_at
    return [
        Spoken(
            call,
            choice,
            asked,
            created_at,
            group_id,
            formed_by,
            retried.get(choice.index),
            (project, call.completion_id(choice)),
            (project, call.trajectory_of(choice)),
        )
        for choice in choices
    ]


def group_row(one: Spoken) -> dict[str, Any]:
    """Its group, where it begins."""
    call = one.call
    return storable_texts(
        {
            "project": call.project,
            "id": one.group_id,
            "policy": call.policy,
            "formed_by": one.formed_by,
            "state": "open",
            "size": 0,
            "rewarded": 0,
            "target_size": call.address.group_size,
            "created_at": one.created_at,
        }
    )


def trajectory_row(one: Spoken) -> dict[str, Any]:
    """Its trajectory, where it begins: with no completion yet."""
    call, address = one.call, one.call.address
    _, trajectory_id = one.trajectory
    return storable_texts(
        {
            "project": call.project,
            "id": trajectory_id,
            "group_id": one.group_id,
            "policy": call.policy,
            "task": address.task,
            "split": address.split,
            "no_train": address.no_train,
            "state": "open",
            "first_version": call.policy_version,
            "last_version": call.policy_version,
            "completions": 0,
            "sampled_tokens": 0,
            "tail_completion_id": None,
            "metadata": None if address.metadata is None else storable_json(address.metadata),
            "created_at": one.created_at,
            "last_seen_at": one.created_at,
            "prompt_hash": call.prompt_hash,
            # A further choice leaves the trajectory that the first one goes on with.
            "continues": call.continues if one.choice.index == 0 else call.extends or call.continues,
            "end_user": call.end_user,
        }
    )


def completion_row(one: Spoken, new: Added, turn: int, *, over: bool) -> dict[str, Any]:
    """What was said, as the turn of that number, of which `new` is stored; `over`: its trajectory had been rewarded."""
    call, choice = one.call, one.choice
    _, completion_id = one.key
    _, trajectory_id = one.trajectory
    history = call.history(choice)
    why_not_trained = call.why_not_trained(choice)
    if over:
        why_not_trained = why_not_trained or "trajectory_over"
    return storable_texts(
        {
            "project": call.project,
            "id": completion_id,
            "upstream_id": call.upstream_id,
            "call_id": call.id,
            "choice": choice.index,
            "trajectory_id": trajectory_id,
            "turn": turn,
            "policy": call.policy,
            "policy_version": call.policy_version,
            "endpoint": call.endpoint,
            "streamed": call.streamed,
            "status": call.status,
            "error": call.error,
            "follows": new.follows,
            "end_user": call.end_user,
            "key_id": call.key_id,
            "new_messages": storable_json([msgspec.json.decode(message) for message in new.messages]),
            "tools": None if new.tools is None else _told_again(new.tools),
            "response": storable_json(choice.message) if choice.message else None,
            "response_text": choice.text,
            "prompt_token_ids": None if new.prompt_token_ids is None else raw_json(new.prompt_token_ids),
            "token_ids": None if choice.token_ids is None else raw_json(choice.token_ids),
            "inference_logprobs": None if choice.logprobs is None else raw_json(choice.logprobs),
            "sampling": _told_again(call.sampling),
            "finish_reason": choice.finish_reason,
            "prompt_tokens": call.prompt_tokens if call.prompt_token_ids is None else len(call.prompt_token_ids),
            "completion_tokens": choice.tokens,
            "ttft_ms": call.ttft_ms,
            "total_ms": call.total_ms,
            "retry_of": one.retry_of,
            "request_digest": None if call.status == "complete" else call.request_digest,
            "turn_key": call.address.turn_key,
            "reply": call.reply if choice.index == 0 else None,
            "threaded_by": call.threaded_by,
            "why_not_trained": why_not_trained,
            "created_at": one.created_at,
            "history": history.conversation,
            "tool_history": history.tool_calls,
            "redactions": call.redactions,
        }
    )


def _told_again(raw: msgspec.Raw) -> msgspec.Raw | None:
    """What was sent, compactly; None for JSON's null."""
    return _known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else _read(raw)


def _read(raw: msgspec.Raw | bytes) -> msgspec.Raw | None:
    value = msgspec.json.decode(raw)
    return None if value is None else storable_json(value)


_known = lru_cache(256)(_read)
