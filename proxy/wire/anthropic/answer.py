"""Translate vLLM's chat answers into those of its own `/v1/messages`: whole, event by event, and errors.

Pure. Follows `vllm/entrypoints/anthropic` of vLLM 0.32, including the order of keys and the framing of events. The chat
answers must contain nothing that capture added.
"""

import json
import uuid
from http.client import responses
from typing import Any

import msgspec


def answer_of(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a whole chat answer as an Anthropic message; its id and model stay.

    Encoded by msgspec, the result is byte for byte vLLM's. For this a tool call's `input` is already encoded JSON.

    Raises:
        ValueError: a tool call's arguments are not a JSON object, as when `max_tokens` cut them short. vLLM then
            answers 400 with this message.
    """
    choice = chat["choices"][0]
    message = choice["message"]
    tool_calls = message.get("tool_calls") or []
    content: list[dict[str, Any]] = []
    if message.get("reasoning"):
        content.append({"type": "thinking", "thinking": message["reasoning"], "signature": _signature()})
    if message.get("content"):
        content.append({"type": "text", "text": message["content"]})
    content += [_tool_use(call) for call in tool_calls]
    stopped = _stopped(choice.get("finish_reason"), choice.get("stop_reason"), bool(tool_calls), bool(tool_calls))
    return {
        "id": chat["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": chat["model"],
        **{name: value for name, value in stopped.items() if value is not None},
        "usage": _usage(chat.get("usage")),
    }


def error_of(chat_error_body: bytes, status: int) -> bytes:
    """Return an error that vLLM answered to a chat (with HTTP status `status`) as it would answer it to an Anthropic
    app."""
    try:
        error = msgspec.json.decode(chat_error_body)["error"]
        return _error(error["type"], error["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        # A number that no standard names has no phrase.
        return _error(responses.get(status, "error"), chat_error_body.decode("utf-8", "replace"))


class MessageEvents:
    """The state of one streamed answer. `feed` it the chunks of a chat stream, and send what it returns."""

    response = None
    """No request can name an earlier message."""

    def __init__(self) -> None:
        self._started = False
        self._error: bytes | None = None
        self._index = 0
        self._block: str | None = None
        """The type of the open block."""
        self._tool_use_id: str | None = None
        self._postponed_text: list[str] = []
        """Text that arrived while a tool call was open. It becomes a block of its own after the call."""
        self._tool_use_ids: dict[int, str] = {}
        self._tool_used = False
        self._arguments: list[str] = []
        """The pieces of the latest tool call's arguments."""
        self._finish_reason: str | None = None
        self._stop_reason: Any = None

    def feed(self, chunk: dict[str, Any]) -> bytes:
        """Take one chunk, without what capture added. Return the events for the app, possibly none."""
        if not self._started:
            self._started = True
            message = {
                "id": chunk["id"],
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": chunk["model"],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(chunk.get("usage")),
            }
            return _event({"type": "message_start", "message": message})
        if not chunk["choices"]:
            complete = self._tool_used and _is_json("".join(self._arguments))
            delta = _stopped(self._finish_reason or "stop", self._stop_reason, self._tool_used, complete)
            return self._close() + _event(
                {"type": "message_delta", "delta": delta, "usage": _usage(chunk.get("usage"))}
            )
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._finish_reason, self._stop_reason = choice["finish_reason"], choice.get("stop_reason")
        delta = choice["delta"]
        events = b""
        if delta.get("reasoning"):
            if self._block != "thinking":
                events = self._close() + self._open({"type": "thinking", "thinking": ""})
            events += self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
        if delta.get("content"):
            events += self._say(delta["content"])
        return events + b"".join(self._call(call) for call in delta.get("tool_calls") or ())

    def error(self, error: dict[str, Any]) -> bytes:
        """Store vLLM's error within a stream. Nothing follows it, so `end` sends it.

        vLLM replaces the message with its own failure to read the error; here the app gets the actual error.
        """
        self._error = _event(
            {"type": "error", "error": {"type": "internal_error", "message": error.get("message", "")}}
        )
        return b""

    def end(self) -> bytes:
        """Return the last events, at chat's `[DONE]`."""
        return self._error or self._close() + _event({"type": "message_stop"})

    def _say(self, text: str) -> bytes:
        if self._block == "tool_use":
            self._postponed_text.append(text)
            return b""
        events = b"" if self._block == "text" else self._close() + self._open({"type": "text", "text": ""})
        return events + self._delta({"type": "text_delta", "text": text})

    def _call(self, call: dict[str, Any]) -> bytes:
        """Process a piece of a tool call: the first brings its id and name, the others more of its arguments."""
        events = b""
        function = call.get("function") or {}
        if call.get("id") is not None:
            self._tool_use_ids[call["index"]] = call["id"]
            if call["id"] != self._tool_use_id and function.get("name") is not None:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                events = self._close() + self._open(block)
                self._tool_used, self._tool_use_id, self._arguments = True, call["id"], []
        tool_use_id = self._tool_use_ids.get(call["index"])
        if function.get("arguments") and tool_use_id is not None and tool_use_id == self._tool_use_id:
            self._arguments.append(function["arguments"])
            events += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        return events

    def _open(self, block: dict[str, Any]) -> bytes:
        self._block = block["type"]
        return _event({"type": "content_block_start", "content_block": block, "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "delta": delta, "index": self._index})

    def _close(self) -> bytes:
        """End the open block, then send the text that was buffered."""
        if self._block is None:
            return b""
        events = b""
        if self._block == "thinking":
            events = self._delta({"type": "signature_delta", "signature": _signature()})
        events += _event({"type": "content_block_stop", "index": self._index})
        postponed, self._postponed_text = "".join(self._postponed_text), []
        self._block = self._tool_use_id = None
        self._index += 1
        return events + (self._say(postponed) + self._close() if postponed else b"")


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _error(kind: str, message: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
    arguments = json.loads(function["arguments"])
    if arguments is None:
        return block
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the tool call {function['name']!r} are no JSON object")
    # Use Python's encoder, not msgspec's: the two write some numbers differently, as 1e+16 and 1e16.
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return block | {"input": msgspec.Raw(written)}


def _stopped(finish_reason: str | None, stop_reason: Any, tool_used: bool, tool_complete: bool) -> dict[str, Any]:
    """Return why the answer ended, in Anthropic's terms. A stop string wins over a tool call only if it cut that call
    short."""
    reason = sequence = None
    if finish_reason == "length":
        reason = "max_tokens"
    elif finish_reason in ("stop", "tool_calls"):
        # A stop token's id, a number, is not a stop sequence.
        if isinstance(stop_reason, str) and not tool_complete:
            reason, sequence = "stop_sequence", stop_reason
        else:
            reason = "tool_use" if tool_used or finish_reason == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: dict[str, Any] | None) -> dict[str, int]:
    """Return the usage in tokens. Anthropic counts tokens read from and written to a cache separately from
    `input_tokens`."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.get("prompt_tokens_details") or {}
    cached = {
        "cache_creation_input_tokens": details.get("created_cache_tokens"),
        "cache_read_input_tokens": details.get("cached_tokens"),
    }
    known = {name: tokens for name, tokens in cached.items() if tokens is not None}
    return {
        "input_tokens": max(0, usage["prompt_tokens"] - sum(known.values())),
        "output_tokens": usage.get("completion_tokens") or 0,
        **known,
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _signature() -> str:
    """Return a random number, as vLLM signs thinking."""
    return uuid.uuid4().hex
