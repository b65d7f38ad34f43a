"""Pass on messages and responses that another server answers in their own dialect, and record them without ids. Pure.

Used where no exact translation to chat exists (`translated`), and for servers other than vLLM.
"""

from typing import Any

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.decoding import Stream, count_of, data_of, decode, encode, raw, read_list, read_object
from proxy.wire.interfaces import Answer, PromptResult, Server
from proxy.wire.request_body import Body, as_list
from proxy.wire.responses.stored import PREVIOUS, stored_of_native
from whetstone.domain.why_not_trained import WhyNotTrained

ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed", "error"})
"""Types of the events that end a stream. From there on, everything is buffered until the call is recorded."""
WHOLE = frozenset({"response.completed", "response.incomplete"})
"""Types of the events that contain a whole response."""


class MessagesOrResponses:
    """What is recorded of a messages or responses request, whichever way it is answered."""

    def __init__(self, endpoint: str, body: Body) -> None:
        self.endpoint = endpoint
        self.model = body.model
        self.stream = body.stream
        metadata = body.values.get("metadata")
        user = body.values.get("user") or (metadata.get("user_id") if isinstance(metadata, dict) else None)
        self.end_user = user if isinstance(user, str) else None
        """The user that the app serves: OpenAI's `user`, Anthropic's `metadata.user_id`."""
        self.tools_or_null = body.tools_or_null
        """The request's tools, as they came; JSON null if it has none."""
        self._body = body

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, message by message, with what precedes it (`system`, `instructions`) first."""
        values, fields = self._body.values, self._body.fields
        before = [values[name] for name in ("system", "instructions") if values.get(name) is not None]
        given = fields.get("messages", fields.get("input", NULL))
        try:
            messages = read_list(given)
        except msgspec.DecodeError:  # a plain text
            messages = [raw({"role": "user", "content": decode(given)})]
        return [raw({"role": "system", "content": content}) for content in before] + messages

    def sampling(self) -> bytes:
        """Return every other field, as one JSON object."""
        return self._body.without("model", "messages", "input", "system", "instructions", "tools")


class NativeRequest(MessagesOrResponses):
    """A request that is passed on in its own dialect."""

    def __init__(self, endpoint: str, body: Body, server: Server, previous_response_id: str | None = None) -> None:
        """`previous_response_id`: the response that it continues, which is already in the body's input."""
        super().__init__(endpoint, body)
        self.path = f"/v1/{endpoint}"
        self._for_vllm = server.captured
        self._previous_response_id = previous_response_id

    conversation = MessagesOrResponses.messages
    """The messages: no chat stands for them."""

    def explore(self, temperature: float) -> bool:
        """Return False: the answer is never trained on."""
        return False

    def may_continue(self) -> bool:
        """Return True: each dialect marks an answer in its own way, so one may be there."""
        return True

    def why_not_trained(self) -> str | None:
        """Return why the answer is never trained on: there are no sampled ids."""
        return WhyNotTrained.NO_TOKEN_IDS if self._for_vllm else WhyNotTrained.DEMONSTRATION

    def constraints(self) -> None:
        """Return None: without ids, constraints say nothing."""

    def to_upstream_body(self, served_name: str, cache_salt: str) -> bytes:
        """Return the body as it came, except for the model. A salt keeps vLLM's cached prefixes within the project."""
        salted = {"cache_salt": raw(cache_salt)} if self._for_vllm else {}
        return encode(self._body.fields | salted | {"model": raw(served_name)})

    def read(self, body: bytes) -> Answer:
        """Read a whole answer."""
        answer: dict[str, Any] = decode(body)
        if not isinstance(answer.get("output") or [], list):
            raise TypeError("an output is a list")
        results = (_result_of(answer),)
        return Answer(encode(self.named(body)), _text(answer.get("id")), results, stored=self.stored_of(answer))

    def new_stream(self) -> "NativeStream":
        """Return the reader of a streamed answer."""
        return NativeStream(self)

    def named(self, answer: msgspec.Raw | bytes) -> dict[str, msgspec.Raw]:
        """Return the fields of an answer, with the model's name and the earlier response as the app gave them."""
        pieces = read_object(answer)
        if "model" in pieces:
            pieces["model"] = raw(self.model)
        if self._previous_response_id is not None:
            pieces[PREVIOUS] = raw(self._previous_response_id)
        return pieces

    def stored_of(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Return what is stored of a whole answer beside the record; None if no request may name it here."""
        if self.endpoint != "responses" or not self._for_vllm:
            return None
        named = {"model": self.model, PREVIOUS: self._previous_response_id}
        return stored_of_native(self._body.values, answer | named)

    def error(self, body: bytes, status: int) -> bytes:
        """Return the body unchanged: an upstream error is already in this dialect."""
        return body


def _text(value: Any) -> str | None:
    """Return a text. Another server may send another type instead."""
    return value if value is None or isinstance(value, str) else str(value)


def _result_of(answer: dict[str, Any]) -> PromptResult:
    """Return the content of a message or a response as one choice. Parts of unknown types count as empty."""
    items = [item for item in as_list(answer.get("output")) if isinstance(item, dict) and item.get("type") == "message"]
    parts = as_list(answer.get("content")) or [part for item in items for part in as_list(item.get("content"))]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return PromptResult(
        prompt_token_ids=None,
        prompt_tokens=_tokens(answer.get("usage"), "input_tokens"),
        answer_tokens=_tokens(answer.get("usage"), "output_tokens"),
        choices=(
            Choice(
                index=0,
                message={"role": "assistant", "content": answer.get("content") or answer.get("output")},
                text_of_parts="".join(texts),
                finish_reason=_text(answer.get("stop_reason") or answer.get("status")),
            ),
        ),
    )


def _tokens(usage: Any, name: str) -> int | None:
    """Return a number of tokens, or None if it was not reported as a number that a column can hold."""
    return count_of(usage.get(name)) if isinstance(usage, dict) else None


class NativeStream(Stream):
    """The state of one streamed message or response."""

    def __init__(self, request: NativeRequest) -> None:
        super().__init__()
        self._request = request
        self._withheld: list[bytes] = []
        self._answer: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    @property
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far."""
        content = {"content": [block for _, block in sorted(self._blocks.items())]}
        return (_result_of(self._answer if self._answer.get("output") else self._answer | content),)

    def last(self) -> bytes:
        """Return the buffered events, from the one that ends the stream."""
        return b"".join(self._withheld)

    def _pass(self, event: bytes) -> bytes:
        data, passed = data_of(event), event + b"\n\n"
        if data is not None and data.startswith(b"{"):
            fields: dict[str, Any] = decode(data)
            for name in ("message", "response"):
                if isinstance(whole := fields.get(name), dict):
                    self.upstream_id = self.upstream_id or _text(whole.get("id"))
                    self._answer |= {
                        field: value for field, value in whole.items() if value is not None and field != "content"
                    }
                    # Raw pieces: nothing else may change.
                    pieces = read_object(data)
                    pieces[name] = raw(self._request.named(pieces[name]))
                    if fields.get("type") in WHOLE:
                        self.stored = self._request.stored_of(whole)
                    passed = passed.replace(data, encode(pieces))
            self._add(fields)
            self.done = self.done or fields.get("type") in ENDS
        if self.done:
            self._withheld.append(passed)
            return b""
        return passed

    def _add(self, fields: dict[str, Any]) -> None:
        index = fields.get("index", fields.get("output_index"))
        place = index if isinstance(index, int) else 0
        if isinstance(block := fields.get("content_block"), dict):
            self._blocks[place] = block
        delta = fields.get("delta")
        if isinstance(delta, str) and fields.get("type") == "response.output_text.delta":
            delta = {"text": delta}
        if isinstance(delta, dict):
            block = self._blocks.setdefault(place, {})
            for name in ("text", "thinking", "partial_json"):
                if isinstance(delta.get(name), str):
                    block[name] = block.get(name, "") + delta[name]
            if delta.get("stop_reason"):
                self._answer["stop_reason"] = delta["stop_reason"]
        if isinstance(usage := fields.get("usage"), dict):
            before = self._answer.get("usage")
            self._answer["usage"] = before | usage if isinstance(before, dict) else usage
        if fields.get("type") == "error" or fields.get("error"):
            self.error = encode(fields.get("error", fields)).decode()
