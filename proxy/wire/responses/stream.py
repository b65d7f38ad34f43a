"""Translate a streamed chat answer into the events that vLLM's own /v1/responses would have sent. Pure; chunks in,
bytes out.

Follows the events of vLLM 0.32, their order and the order of their keys. An answer is a sequence of items (reasoning,
text, tool calls). Each is opened, sent piece by piece, and closed before the next. The chunks must contain nothing that
capture added, except the prompt's ids.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from proxy.wire.responses.answer import (
    Echo,
    call_item,
    custom_call_item,
    echo_of,
    item_id,
    logprobs_of,
    message_item,
    reasoning_item,
    text_part,
)
from proxy.wire.responses.custom import InputReader, input_of
from proxy.wire.responses.tools import NO_NAMES

_PART: dict[str, Any] = {"content_index": 0}
"""Names the one part that an item with parts has."""
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning": ("response.reasoning_text", _PART),
    "message": ("response.output_text", _PART | {"logprobs": []}),
    "function_call": ("response.function_call_arguments", {}),
    "custom_tool_call": ("response.custom_tool_call_input", {}),
}
"""By an item's type: what the events of its text are called, and the fields that they have."""


class ResponseEvents:
    """The state of one streamed answer. `feed` it the chunks of a chat stream, and send what it returns."""

    def __init__(self, values: dict[str, Any], max_model_len: int) -> None:
        """`values` is the request; `max_model_len` the most tokens of prompt and answer together."""
        self._values = values
        self._max_model_len = max_model_len
        self._echo: Echo | None = None
        self._names = NO_NAMES
        self._sequence_number = 0
        self._output: list[dict[str, Any]] = []
        self._kind: str | None = None
        """The type of the open item."""
        self._texts: list[str] = []
        """The pieces of its text so far."""
        self._logprobs: list[dict[str, Any]] = []
        """The logprobs of its tokens so far."""
        self._call: dict[str, Any] = {}
        """The first piece of the latest tool call."""
        self._input = InputReader()
        """Reads the text of the open call of a custom tool."""
        self._input_texts: list[str] = []
        """The pieces of that text so far."""
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] | None = None
        self.response: dict[str, Any] | None = None
        """The whole response, once the stream has ended."""

    def feed(self, chunk: dict[str, Any]) -> bytes:
        """Take one chunk: the first with `prompt_token_ids`, the last with `usage`. Return the events, possibly
        none."""
        if self._echo is None:
            prompt_tokens = len(chunk["prompt_token_ids"])
            self._echo = echo_of(chunk, self._values, prompt_tokens, self._max_model_len)
            self._names = self._echo.names()
            response = self._echo.response("in_progress", [])
            return self._event("response.created", response=response) + self._event(
                "response.in_progress", response=response
            )
        if not chunk["choices"]:
            self._usage = chunk["usage"]
            return self._close()
        choice = chunk["choices"][0]
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        logprobs = logprobs_of(choice) if self._echo.shows_logprobs else []
        pieces = self._pieces(choice["delta"], self._echo)
        return b"".join(self._say(kind, text, call, logprobs) for kind, text, call in pieces)

    def error(self, error: dict[str, Any]) -> bytes:
        """Return the event for an error within the stream. vLLM itself breaks off there; here the app gets the actual
        error."""
        fields = {name: error.get(name) for name in ("message", "param")}
        code = error.get("code")
        return self._event("error", code=None if code is None else str(code), **fields)

    def end(self) -> bytes:
        """Return the last event: the whole response. Nothing if the answer broke off."""
        if self._echo is None or self._usage is None:
            return b""
        self.response = self._echo.ended(self._output, self._finish_reason, self._usage)
        return self._event("response.completed", response=self.response)

    def _say(self, kind: str, text: str, call: dict[str, Any] | None, logprobs: list[dict[str, Any]]) -> bytes:
        """Send a piece of an item. Open a new item if the piece does not continue the open one."""
        another = call is not None and call["index"] != self._call.get("index", call["index"])
        events = self._close() + self._open(kind, call) if kind != self._kind or another else b""
        if call is not None and not text:
            return events
        self._texts.append(text)
        if kind == "custom_tool_call":
            return events + self._input_event(self._input.feed(text))
        if kind == "message" and logprobs:
            self._logprobs += logprobs
            return events + self._text_event("delta", delta=text, logprobs=list(map(_short, logprobs)))
        return events + self._text_event("delta", delta=text)

    def _open(self, kind: str, call: dict[str, Any] | None) -> bytes:
        self._kind, self._texts, self._logprobs = kind, [], []
        if call is not None:
            self._call = call
        part: dict[str, Any] | None = None
        if kind == "reasoning":
            item, part = reasoning_item(self._item_id, None, "in_progress"), {"text": "", "type": "reasoning_text"}
        elif kind == "message":
            item, part = message_item(self._item_id, [], "in_progress"), text_part("", [])
        else:
            self._input, self._input_texts = InputReader(), []
            item = self._called("", "in_progress")
        added = self._event("response.output_item.added", output_index=len(self._output), item=item)
        return added if part is None else added + self._item_event("response.content_part.added", **_PART, part=part)

    def _close(self) -> bytes:
        """End the open item."""
        if self._kind is None:
            return b""
        text = "".join(self._texts)
        if self._kind == "function_call":
            item = self._called(text, "completed")
            events = self._text_event("done", arguments=text, name=item["name"])
        elif self._kind == "custom_tool_call":
            item = self._called(text, "completed")
            before = "".join(self._input_texts)
            # A text that does not continue what was sent is sent again, as vLLM does.
            events = self._input_event(item["input"].removeprefix(before))
            events += self._text_event("done", input=item["input"])
        elif self._kind == "reasoning":
            item = reasoning_item(self._item_id, text, "completed")
            events = self._parted(text, {"text": text, "type": "reasoning_text"})
        else:
            part = text_part(text, self._logprobs or None)
            item = message_item(self._item_id, [part], "completed")
            events = self._parted(text, part)
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._kind = None
        return events

    def _parted(self, text: str, part: dict[str, Any]) -> bytes:
        """Return the events that end the text of an item with parts."""
        return self._text_event("done", text=text) + self._item_event("response.content_part.done", **_PART, part=part)

    def _called(self, arguments: str, status: str) -> dict[str, Any]:
        name, call_id = self._call["function"].get("name") or "", self._call.get("id") or self._item_id
        if self._kind == "custom_tool_call":
            return custom_call_item(self._item_id, call_id, name, input_of(arguments))
        return call_item(self._item_id, call_id, self._names.split(name), arguments, status)

    @property
    def _item_id(self) -> str:
        assert self._echo is not None and self._kind is not None
        return item_id(self._kind, self._echo.id, len(self._output))

    def _input_event(self, text: str) -> bytes:
        """Return the event for more of the text that a custom tool is called with, if there is more."""
        if not text:
            return b""
        self._input_texts.append(text)
        return self._text_event("delta", delta=text)

    def _text_event(self, verb: str, **values: Any) -> bytes:
        """Return an event of the open item's text."""
        assert self._kind is not None
        name, fields = _TEXTS[self._kind]
        return self._item_event(f"{name}.{verb}", **fields | values)

    def _item_event(self, kind: str, **values: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._output), **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        fields = values | {"sequence_number": self._sequence_number, "type": kind}
        self._sequence_number += 1
        # Keys sorted, as vLLM writes them.
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(dict(sorted(fields.items()))))

    def _pieces(self, delta: dict[str, Any], echo: Echo) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        """Yield the pieces in a chunk: the kind of item, the text, and a tool call's first piece."""
        if delta.get("reasoning") is not None and echo.shows_reasoning:
            yield "reasoning", delta["reasoning"], None
        if delta.get("content"):
            yield "message", delta["content"], None
        calls: dict[int, list[dict[str, Any]]] = {}
        for call in delta.get("tool_calls") or ():
            calls.setdefault(call["index"], []).append(call)
        for pieces in calls.values():
            if pieces[0].get("function") is not None:
                arguments = "".join((piece.get("function") or {}).get("arguments") or "" for piece in pieces)
                yield self._kind_of(pieces[0]), arguments, pieces[0]

    def _kind_of(self, call: dict[str, Any]) -> str:
        """Return the type of item of a call. Only its first piece has the name."""
        name = call["function"].get("name") or self._call.get("function", {}).get("name")
        return "custom_tool_call" if name in self._names.custom else "function_call"


def _short(logprob: dict[str, Any]) -> dict[str, Any]:
    """Return a token's logprob as the events of a text have it."""
    others = [{name: other[name] for name in ("token", "logprob")} for other in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": others}
