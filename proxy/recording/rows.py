"""Build the rows of groups, trajectories, completions and their ids from a served call, in the form that
`whetstone.database.bulk` takes. Pure.

JSON from apps and vLLM is decoded and encoded compactly, so that plain SQL finds equal values whatever their original
spelling.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

from proxy.domain.call import Call, Choice
from proxy.recording.prefix_delta import RequestMessages, TurnDelta
from whetstone.database.bulk import raw_ids
from whetstone.database.types import as_json_bytes, storable_encoded, storable_json, storable_text
from whetstone.domain.states import GroupState, TrajectoryStatus

LARGEST_KNOWN = 4096
"""Sampling fields and tools up to this many bytes are cached: they are the same in nearly all requests of an app."""

_decode = msgspec.json.Decoder().decode

Key = tuple[str, str]
"""Project and id."""


# Rows are built with positional arguments in column order: with keywords this takes three times as long. Most texts are
# missing, so each is checked first; a call to sanitize it costs ten times as much as the check.


class TrajectoryRow(msgspec.Struct):
    """A new trajectory. Its counts include the completions that are about to be written."""

    project: str
    id: str
    group_id: str | None
    policy: str
    task: str | None
    split: str
    no_train: bool
    state: str
    first_version: int
    last_version: int
    completions: int
    sampled_tokens: int
    tail_completion_id: str | None
    metadata: bytes | None
    created_at: datetime
    last_seen_at: datetime
    prompt_hash: str | None
    continues: str | None
    end_user: str | None
    why_not_trained: str | None


class CompletionRow(msgspec.Struct, frozen=True):
    """A completion."""

    project: str
    id: str
    upstream_id: str
    call_id: str
    choice: int
    trajectory_id: str
    turn: int
    policy: str
    policy_version: int
    endpoint: str
    streamed: bool
    status: str
    error: str | None
    follows: str | None
    end_user: str | None
    key_id: str | None
    new_messages: bytes
    tools: bytes | None
    response: bytes | None
    response_text: str | None
    prompt_token_ids: bytes | None
    token_ids: bytes | None
    inference_logprobs: bytes | None
    sampling: bytes | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_ms: float | None
    total_ms: float
    retry_of: str | None
    request_digest: str | None
    turn_key: str | None
    reply: bytes | None
    threaded_by: str
    why_not_trained: str | None
    created_at: datetime
    history: bytes | None
    tool_history: bytes | None
    redactions: int | None
    constraints: bytes | None
    explored: float | None
    stored_response: bytes | None


class AnswerId(msgspec.Struct, frozen=True):
    """An id within a completion's answer."""

    project: str
    completion_id: str
    id: str


class TrajectoryCounts(msgspec.Struct):
    """An existing trajectory, with the counts that its calls lead to."""

    project: str
    id: str
    completions: int
    sampled_tokens: int
    tail_completion_id: str | None
    last_seen_at: datetime
    last_version: int | None = None
    """Version of the last completion that is about to be written; None if there is none."""


class NewCompletion(msgspec.Struct, frozen=True):
    """One choice of a call, to be written to the tables."""

    call: Call
    choice: Choice
    request: RequestMessages
    """The call's messages."""
    created_at: datetime
    group_id: str | None
    formed_by: str
    retry_of: str | None
    key: Key
    trajectory: Key

    @property
    def group(self) -> Key:
        """Return the key of its group; the id is empty if it has none."""
        return self.call.project, self.group_id or ""


def new_completions(call: Call, retried: Mapping[int, str]) -> list[NewCompletion]:
    """Return one `NewCompletion` for each choice of a call. `retried`: the completions that it retries, by choice."""
    choices = call.choices or (Choice(0, {}),)
    group_id, formed_by, project = call.address.group_id, "header", call.project
    if call.threaded_by in ("shadow", "evaluation"):
        formed_by = call.threaded_by
    elif group_id is None and len(choices) > 1:
        group_id, formed_by = f"{call.siblings}.choices", "choices"
    request, created_at = RequestMessages(call.messages), call.created_at
    return [
        NewCompletion(
            call,
            choice,
            request,
            created_at,
            group_id,
            formed_by,
            retried.get(choice.index),
            (project, call.completion_id(choice)),
            (project, call.trajectory_of(choice)),
        )
        for choice in choices
    ]


def group_row(one: NewCompletion) -> dict[str, Any]:
    """Return the row of its group, when the group is new."""
    project, group_id = one.group
    return {
        "project": project,
        "id": group_id,
        "policy": one.call.policy,
        "formed_by": one.formed_by,
        "state": GroupState.OPEN.value,
        "size": 0,
        "rewarded": 0,
        "target_size": one.call.address.group_size,
        "created_at": one.created_at,
    }


def trajectory_row(one: NewCompletion) -> TrajectoryRow:
    """Return the row of its trajectory, when the trajectory begins with this choice; the choice is not counted yet."""
    call, address, created_at = one.call, one.call.address, one.created_at
    project, its_id = one.trajectory
    state, completions, sampled_tokens, tail = TrajectoryStatus.OPEN.value, 0, 0, None
    return TrajectoryRow(
        project,
        its_id,
        one.group_id,
        call.policy,
        address.task and storable_text(address.task),
        address.split,
        address.no_train,
        state,
        call.policy_version,
        call.policy_version,
        completions,
        sampled_tokens,
        tail,
        None if address.metadata is None else storable_json(address.metadata),
        created_at,
        created_at,
        call.prompt_hash,
        # A further choice branches from the trajectory that the first choice continues.
        call.continues if one.choice.index == 0 else call.extends or call.continues,
        call.end_user and storable_text(call.end_user),
        None,
    )


def completion_row(one: NewCompletion, new: TurnDelta, turn: int, *, over: bool) -> CompletionRow:
    """Return the row of a choice as turn number `turn`; `new` is what is stored of its prompt. `over`: its trajectory
    is already rewarded."""
    call, choice = one.call, one.choice
    project, completion_id = one.key
    history = call.history(choice)
    why_not_trained = call.why_not_trained(choice) or ("trajectory_over" if over else None)
    return CompletionRow(
        project,
        completion_id,
        call.upstream_id.replace("\x00", "\ufffd"),
        call.id,
        choice.index,
        one.trajectory[1],
        turn,
        call.policy,
        call.policy_version,
        call.endpoint,
        call.streamed,
        call.status,
        call.error and storable_text(call.error),
        new.follows,
        call.end_user and storable_text(call.end_user),
        call.key_id,
        storable_encoded(new.messages_json),
        None if new.tools is None else _compact(new.tools),
        storable_json(choice.message) if choice.message else None,
        storable_text(choice.text_beside),
        None if new.prompt_token_ids is None else raw_ids(new.prompt_token_ids),
        None if choice.token_ids is None else raw_ids(choice.token_ids),
        None if choice.logprobs is None else as_json_bytes(choice.logprobs),
        _compact(call.sampling),
        choice.finish_reason and storable_text(choice.finish_reason),
        call.prompt_tokens if call.prompt_token_ids is None else len(call.prompt_token_ids),
        choice.tokens,
        call.ttft_ms,
        call.total_ms,
        one.retry_of,
        None if call.status == "complete" else call.request_digest,
        call.address.turn_key and storable_text(call.address.turn_key),
        call.reply if choice.index == 0 else None,
        call.threaded_by,
        why_not_trained and storable_text(why_not_trained),
        one.created_at,
        history.conversation,
        history.tool_calls,
        call.redactions,
        None if call.constraints is None else as_json_bytes(call.constraints),
        call.explored,
        None if call.stored is None else storable_json(call.stored),
    )


def answer_ids(one: NewCompletion) -> list[AnswerId]:
    """Return the rows of the ids within an answer, besides its own."""
    return [AnswerId(*one.key, inner_id) for inner_id in one.choice.inner_ids]


def _compact(raw: msgspec.Raw) -> bytes | None:
    """Return the JSON compactly; None for null."""
    return _known(bytes(raw)) if len(raw) <= LARGEST_KNOWN else _read(raw)


def _read(raw: msgspec.Raw | bytes) -> bytes | None:
    value = _decode(raw)
    return None if value is None else storable_json(value)


_known = lru_cache(256)(_read)
