"""Messages and responses as another server says them itself: passed on as they are, recorded without ids. Pure.

Used where no exact translation to chat exists (`translated`), and for servers that are no vLLM.
"""

from typing import Any

import msgspec

from proxy.call import NULL, Choice
from proxy.wire.body import Body
from proxy.wire.dialect import Answer, Heard, Number, Server, raw
from proxy.wire.sse import Events, data_of
from whetstone.reasons import WhyNotTrained

ENDS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed", "error"})
"""Types of the events that end a stream; from there on everything is held back until the call is recorded."""

_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_pieces = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NativeAsked:
    """A request of a dialect that is passed on."""

    def __init__(self, endpoint: str, body: Body, server: Server) -> None:
        self.endpoint = endpoint
        self.path = f"/v1/{endpoint}"
        self.model = body.model
        self.stream = body.stream
        self.end_user = end_user_of(body)
        self._body = body
        self._for_vllm = server.captured

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, what stands before it (`system`, `instructions`) first."""
        return conversation(self._body)

    conversation = messages

    def goes_on(self) -> bool:
        """Whether there may be an answer in it: each dialect has its own words for one."""
        return True

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null when it has none."""
        return self._body.tools_or_null

    def sampling(self) -> bytes:
        """Every other field, as one JSON object."""
        return self._body.without(*NOT_SAMPLING)

    def why_not_trained(self) -> str | None:
        """Nothing is trained on without the sampled ids."""
        return WhyNotTrained.NO_TOKEN_IDS if self._for_vllm else WhyNotTrained.DEMONSTRATION

    def for_upstream(self, served_name: str, cache_salt: str) -> bytes:
        """The body as it came, but for the model; what vLLM keeps of it in its cache is the project's alone."""
        salted = {"cache_salt": raw(cache_salt)} if self._for_vllm else {}
        return msgspec.json.encode(self._body.fields | salted | {"model": raw(served_name)})

    def read(self, body: bytes) -> Answer:
        """Take a whole answer apart."""
        said: dict[str, Any] = msgspec.json.decode(body)
        if not isinstance(said.get("output") or [], list):
            raise TypeError("an output is a list")
        pieces = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if "model" in pieces:
            pieces["model"] = raw(self.model)
        return Answer(msgspec.json.encode(pieces), _text(said.get("id")), (_heard(said),))

    def events(self) -> "NativeStream":
        """Take a streamed one apart."""
        return NativeStream(self.model)

    def error(self, body: bytes, status: int) -> bytes:
        """An error of upstream's is in this dialect already."""
        return body


NOT_SAMPLING = ("model", "messages", "input", "system", "instructions", "tools")


def end_user_of(body: Body) -> str | None:
    """Whom the app serves: OpenAI's `user`, Anthropic's `metadata.user_id`."""
    metadata = body.values.get("metadata")
    user = body.values.get("user") or (metadata.get("user_id") if isinstance(metadata, dict) else None)
    return user if isinstance(user, str) else None


def conversation(body: Body) -> list[msgspec.Raw]:
    """The conversation of a messages or responses request, message by message, as it came."""
    messages = [
        raw({"role": "system", "content": body.values[name]}) for name in ("system", "instructions") if body.given(name)
    ]
    given = body.fields.get("messages", body.fields.get("input", NULL))
    try:
        return messages + _list_decoder.decode(given)
    except msgspec.DecodeError:  # a text alone
        return [*messages, raw({"role": "user", "content": msgspec.json.decode(given)})]


def _text(told: Any) -> str | None:
    """A text, of what another server may tell as something else."""
    return told if told is None or isinstance(told, str) else str(told)


def _heard(said: dict[str, Any]) -> Heard:
    """What a message or a response says, as one choice. What is of another type than either has says nothing."""
    items = [item for item in _list(said.get("output")) if isinstance(item, dict) and item.get("type") == "message"]
    parts = _list(said.get("content")) or [part for item in items for part in _list(item.get("content"))]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return Heard(
        prompt_token_ids=None,
        prompt_tokens=_tokens(said.get("usage")),
        choices=(
            Choice(
                index=0,
                message={"role": "assistant", "content": said.get("content") or said.get("output")},
                text_of_parts="".join(texts),
                finish_reason=_text(said.get("stop_reason") or said.get("status")),
            ),
        ),
    )


class _Usage(msgspec.Struct):
    input_tokens: Number | None = None


def _tokens(usage: Any) -> int | None:
    """Those of the prompt; None where they were not told as any column holds them."""
    try:
        return msgspec.convert(usage, _Usage).input_tokens
    except msgspec.ValidationError:
        return None


def _list(told: Any) -> list[Any]:
    return told if isinstance(told, list) else []


def _place(fields: dict[str, Any]) -> int:
    """Of the block that an event speaks of."""
    told = fields.get("index", fields.get("output_index"))
    return told if isinstance(told, int) else 0


class NativeStream:
    """The state of one streamed message or response (`dialect.Stream`)."""

    def __init__(self, model: str) -> None:
        self._model = raw(model)
        self._events = Events()
        self._held: list[bytes] = []
        self._said: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self.upstream_id: str | None = None
        self.error: str | None = None
        self.done = False

    @property
    def heard(self) -> tuple[Heard, ...]:
        """What was said so far."""
        blocks = [block for _, block in sorted(self._blocks.items())]
        return (_heard(self._said if self._said.get("output") else self._said | {"content": blocks}),)

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come; return the events for the app, possibly none."""
        return b"".join(self._pass(event) for event in self._events.feed(data))

    def last(self) -> bytes:
        """What was held back from the event on that ends the stream."""
        return b"".join(self._held)

    def _pass(self, event: bytes) -> bytes:
        said = data_of(event)
        passed = event + b"\n\n"
        if said is not None and said.startswith(b"{"):
            fields: dict[str, Any] = msgspec.json.decode(said)
            for name in ("message", "response"):
                if isinstance(whole := fields.get(name), dict):
                    self._hear_whole(whole)
                    passed = passed.replace(said, self._renamed(said, name))
            self._hear(fields)
            self.done = self.done or fields.get("type") in ENDS
        if self.done:
            self._held.append(passed)
            return b""
        return passed

    def _renamed(self, said: bytes, name: str) -> bytes:
        """The event's data; nothing but the model's name in its `name` changes."""
        pieces = _pieces.decode(said)
        whole = _pieces.decode(pieces[name])
        if "model" in whole:
            pieces[name] = raw(whole | {"model": self._model})
        return msgspec.json.encode(pieces)

    def _hear_whole(self, whole: dict[str, Any]) -> None:
        self.upstream_id = self.upstream_id or _text(whole.get("id"))
        self._said |= {name: value for name, value in whole.items() if value is not None and name != "content"}

    def _hear(self, fields: dict[str, Any]) -> None:
        if isinstance(block := fields.get("content_block"), dict):
            self._blocks[_place(fields)] = dict(block)
        delta = fields.get("delta")
        if isinstance(delta, str) and fields.get("type") == "response.output_text.delta":
            delta = {"text": delta}
        if isinstance(delta, dict):
            block = self._blocks.setdefault(_place(fields), {})
            for name in ("text", "thinking", "partial_json"):
                if isinstance(delta.get(name), str):
                    block[name] = block.get(name, "") + delta[name]
            if delta.get("stop_reason"):
                self._said["stop_reason"] = delta["stop_reason"]
        if isinstance(usage := fields.get("usage"), dict):
            before = self._said.get("usage")
            self._said["usage"] = before | usage if isinstance(before, dict) else usage
        if fields.get("type") == "error" or fields.get("error"):
            self.error = msgspec.json.encode(fields.get("error", fields)).decode()
