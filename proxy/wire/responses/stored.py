"""Rebuild stored responses from what is recorded of them, and put what a request refers to into its input. Pure.

A response is stored unless its request says `store: false`. The record of its call has nearly all its fields;
`stored_of` and `stored_of_native` return the rest. A request refers to a whole response (`previous_response_id`) or to
one item (`item_reference`). It becomes the request that has the conversation in its place, so that prompt, trajectory
and record are those of that request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.domain.answer_ids import item_id_of
from proxy.domain.stored_turn import StoredTurn
from proxy.wire.decoding import raw, read_list
from proxy.wire.request_body import Body
from proxy.wire.responses.answer import PREFIXES, Echo, output_of
from proxy.wire.responses.schema import shows_reasoning
from proxy.wire.responses.tools import names_of

PREVIOUS = "previous_response_id"

_NOT_ELSEWHERE = ("created_at", "model", "status", "max_output_tokens", "usage", PREVIOUS)
"""Fields of an answer that no other column has."""
_ELSEWHERE = ("id", "output", "input_messages", "output_messages")
"""Fields of an answer that other columns have, or that repeat the conversation."""
_ORDER = {"reasoning": 0, "message": 1, "function_call": 2}
"""The usual order of an answer's items, by type: the one that a chat message stands for."""
_PREFIXES = PREFIXES | {"function_call_output": "fc", "custom_tool_call_output": "ctc"}


class References(msgspec.Struct, frozen=True):
    """What a request refers to."""

    previous: str | None
    """Id of the response that it continues."""
    items: Sequence[str]
    """Ids of items in its input."""


def references_of(values: Mapping[str, Any]) -> References | None:
    """Return what a request refers to; None if it refers to nothing, or has no input that could follow."""
    previous, given = values.get(PREVIOUS), values.get("input")
    items = [item["id"] for item in given if _refers(item)] if isinstance(given, list) else []
    if not isinstance(previous, str):
        previous = None
    return References(previous, items) if (previous or items) and isinstance(given, str | list) else None


def with_references(body: Body, before: Sequence[Any], items: Mapping[str, Any]) -> Body:
    """Return the request with the conversation in place of what it refers to.

    Args:
        body: the request.
        before: the items of the conversation that it continues.
        items: the items that it refers to, by id.
    """
    given = body.values["input"]
    if isinstance(given, str):
        message = {"role": "user", "content": given}
        pieces, own = [raw(message)], [message]
    else:
        pieces = [
            raw(items[item["id"]]) if _refers(item) else piece
            for item, piece in zip(given, read_list(body.fields["input"]), strict=True)
        ]
        own = [items[item["id"]] if _refers(item) else item for item in given]
    fields = body.fields | {"input": raw([*map(raw, before), *pieces])}
    values = body.values | {"input": [*before, *own]}
    fields.pop(PREVIOUS, None)
    previous = values.pop(PREVIOUS, None)
    return msgspec.structs.replace(body, fields=fields, values=values, previous_response_id=previous)


def stored_of(values: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the record of a response lacks; None if it is not to be stored.

    Args:
        values: the request.
        response: the whole answer, translated from chat.
    """
    if values.get("store") is False:
        return None
    stored = {name: response[name] for name in _NOT_ELSEWHERE} | {"instructions": _instructed(values)}
    if not _is_usual(values, response["output"]):
        stored["output"] = response["output"]
    return stored


def stored_of_native(values: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the same for an answer that vLLM itself gave in this dialect: every field but the output and those that
    the app sent, whose values are in the record."""
    if values.get("store") is False:
        return None
    echoed = [name for name in response if name in values and name != "model"]
    own = {name: value for name, value in response.items() if name not in (*_ELSEWHERE, *echoed)}
    return {"answer": own, "echoed": echoed, "instructions": _instructed(values)}


def why_withheld(conversation: Sequence[StoredTurn]) -> str | None:
    """Return why no request may refer to a response, or None if it may be referred to.

    Args:
        conversation: the response, last, and the turns before it.
    """
    if conversation[-1].stored is None:
        return "it was made with `store: false`, or deleted"
    if any(map(_is_redacted, conversation)):
        return "private text was removed from it before it was stored; send the whole conversation instead"
    return None


def output_items(turn: StoredTurn, tools: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the output of a response. `tools`: its request's, for what is not stored: a turn of a conversation may
    have been made with `store: false`, or forgotten."""
    message = turn.response or {}
    items: list[dict[str, Any]]
    if isinstance(message.get("content"), list):
        items = message["content"]
        return items
    if turn.stored is not None and "output" in turn.stored:
        items = turn.stored["output"]
        return items
    if not shows_reasoning(turn.sampling or {}):
        message = message | {"reasoning": None}
    items = output_of(message, turn.response_id, names_of(list(tools)))
    # In a stream vLLM says of thoughts that they are complete.
    if turn.streamed:
        items = [item | {"status": "completed"} if item.get("status") is None else item for item in items]
    return items


def input_items(conversation: Sequence[StoredTurn]) -> list[Any]:
    """Return the input of a response as its request had it, or would have had it without `previous_response_id`.

    Args:
        conversation: the response, last, and the turns before it.
    """
    items: list[Any] = []
    before: StoredTurn | None = None
    tools: Sequence[Any] = ()
    for turn in conversation:
        if before is not None:
            items += output_items(before, tools)[:1]
        items += turn.new_messages
        before, tools = turn, tools if turn.tools is None else turn.tools
    return items[1:] if before is not None and _has_instructions(before) else items


def listed_items(conversation: Sequence[StoredTurn]) -> list[dict[str, Any]]:
    """Return the same as the API lists it: each item with an id, a message with its parts."""
    response_id = conversation[-1].response_id.removeprefix("resp_")
    listed = []
    for place, item in enumerate(input_items(conversation)):
        kind = item.get("type") or "message"
        one: dict[str, Any] = {"id": f"{_PREFIXES.get(kind, 'msg')}_{response_id}_in_{place}", "type": kind}
        if kind == "message":
            one["status"] = "completed"
        one |= {name: value for name, value in item.items() if value is not None}
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            one["content"] = [{"type": part, "text": item["content"]}]
        listed.append(one)
    return listed


def item_named(name: str, conversation: Sequence[StoredTurn]) -> dict[str, Any] | None:
    """Return the item with this id, of a response's output or, if the turns before it are given, of its input."""
    named = item_id_of(name)
    if named is None or not named.of_input:
        return next((item for item in output_items(conversation[-1]) if item.get("id") == name), None)
    items = input_items(conversation)
    item: dict[str, Any] | None = items[named.place] if named.place < len(items) else None
    return item


def whole_response(conversation: Sequence[StoredTurn]) -> dict[str, Any]:
    """Return a stored response as it was answered.

    Args:
        conversation: the response, last, and the turns before it.
    """
    turn = conversation[-1]
    stored, output = turn.stored or {}, output_items(turn)
    values = dict(turn.sampling or {})
    tools = next((one.tools for one in reversed(conversation) if one.tools is not None), None)
    values |= {} if tools is None else {"tools": tools}
    if _has_instructions(turn):
        values["instructions"] = conversation[0].new_messages[0]["content"]
    if "answer" in stored:
        echoed = {name: values[name] for name in stored["echoed"] if name in values}
        return {"id": turn.response_id, **stored["answer"], **echoed, "output": output}
    echo = Echo(
        id=turn.response_id,
        created_at=stored["created_at"],
        model=stored["model"],
        values=values | {PREVIOUS: stored[PREVIOUS]},
        max_output_tokens=stored["max_output_tokens"],
    )
    return echo.response(stored["status"], output, stored["usage"])


def _refers(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or (item.get("type") is None and item.keys() <= {"id", "type"})


def _instructed(values: Mapping[str, Any]) -> bool:
    """Return whether the first message that is recorded is the request's instructions."""
    return values.get("instructions") is not None


def _has_instructions(turn: StoredTurn) -> bool:
    return bool((turn.stored or {}).get("instructions"))


def _is_redacted(turn: StoredTurn) -> bool:
    return bool(turn.redactions) if turn.stored is None else "redacted" in turn.stored


def _is_usual(values: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `output_of` makes this output again of the chat message that is recorded, which has one text,
    wherever the model wrote its parts."""
    kinds = [item["type"] for item in output]
    if not _ORDER.keys() >= set(kinds) or kinds.count("message") > 1 or kinds.count("reasoning") > 1:
        return False
    has_more = any(
        item.get("namespace") or (item["type"] == "message" and item["content"][0]["logprobs"] is not None)
        for item in output
    )
    return kinds == sorted(kinds, key=_ORDER.__getitem__) and shows_reasoning(values) and not has_more
