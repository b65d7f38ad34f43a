"""A streamed chat answer, event by event: captured, and passed on without what the app did not ask for.

Bytes in, bytes out. Knows the SSE grammar and OpenAI's chunks; never opens a socket.
"""

from typing import Any

import msgspec

from proxy.answer import read_ids, read_logprobs, strip_choice, strip_top
from proxy.call import NULL, Choice
from proxy.request import Asked

DONE = b"data: [DONE]"
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_EMPTY_DELTAS = (b"{}", b"null")


class _Spoken:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.token_ids: list[int] | None = None
        self.logprobs: list[float] | None = None
        self.finish_reason: str | None = None

    def hear(self, choice: dict[str, msgspec.Raw]) -> None:
        ids = read_ids(choice.get("token_ids"))
        if ids is not None:
            self.token_ids = (self.token_ids or []) + ids
        logprobs = read_logprobs(choice.get("logprobs"))
        if logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprobs
        self.finish_reason = msgspec.json.decode(choice.get("finish_reason", NULL)) or self.finish_reason
        delta: dict[str, Any] = msgspec.json.decode(choice.get("delta", NULL)) or {}
        self.role = delta.get("role") or self.role
        for part in ("content", "reasoning", "refusal"):
            if isinstance(delta.get(part), str):
                self.texts.setdefault(part, []).append(delta[part])
        for piece in delta.get("tool_calls") or ():
            self._hear_tool_call(piece)

    def _hear_tool_call(self, piece: dict[str, Any]) -> None:
        call = self.tool_calls.setdefault(piece.get("index", 0), {"id": None, "type": "function", "function": {}})
        call["id"] = piece.get("id") or call["id"]
        spoken = piece.get("function") or {}
        if spoken.get("name"):
            call["function"]["name"] = spoken["name"]
        call["function"]["arguments"] = call["function"].get("arguments", "") + (spoken.get("arguments") or "")

    def frozen(self, index: int) -> Choice:
        message: dict[str, Any] = {"role": self.role}
        message |= {part: "".join(texts) for part, texts in self.texts.items()}
        if self.tool_calls:
            message["tool_calls"] = [self.tool_calls[place] for place in sorted(self.tool_calls)]
        return Choice(
            index=index,
            message=message,
            text=message.get("content"),
            finish_reason=self.finish_reason,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
        )


class Stream:
    """The state of one streamed answer. `feed` it vLLM's bytes; send what it returns."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._rest = b""
        self._spoken: dict[int, _Spoken] = {}
        self.prompt_token_ids: list[int] | None = None
        self.prompt_tokens: int | None = None
        self.error: str | None = None
        self.done = False
        """vLLM has said `[DONE]`. It is held back: whoever records the call sends DONE_EVENT after it."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was spoken so far."""
        return tuple(self._spoken[index].frozen(index) for index in sorted(self._spoken))

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come, whole events or not; return the events for the app, possibly none.

        Raises:
            UNREADABLE: an event is no chunk of a chat completion.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._pass(event) for event in events)

    def _pass(self, event: bytes) -> bytes:
        if event == DONE:
            self.done = True
            return b""
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        fields = _object.decode(memoryview(event)[6:])
        if "error" in fields:
            self.error = bytes(fields["error"]).decode()
            return event + b"\n\n"
        choices = _objects.decode(fields["choices"]) if "choices" in fields else []
        if "prompt_token_ids" in fields and self.prompt_token_ids is None:
            self.prompt_token_ids = read_ids(fields["prompt_token_ids"])
        if "usage" in fields and fields["usage"] != NULL:
            self.prompt_tokens = msgspec.json.decode(fields["usage"]).get("prompt_tokens")
        exists_without_capture = not choices
        for choice in choices:
            self._spoken.setdefault(msgspec.json.decode(choice["index"]), _Spoken()).hear(choice)
            strip_choice(choice, self._asked)
            # vLLM alone sends no event for a token that adds nothing: no text, no end.
            silent = bytes(choice.get("delta", NULL)) in _EMPTY_DELTAS and choice.get("finish_reason", NULL) == NULL
            exists_without_capture |= not silent or self._asked.wants_logprobs or self._asked.wants_token_ids
        if not exists_without_capture:
            return b""
        strip_top(fields, self._asked)
        fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
        return b"data: " + msgspec.json.encode(fields) + b"\n\n"


DONE_EVENT = DONE + b"\n\n"
