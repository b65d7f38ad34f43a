"""A streamed chat answer, event by event: captured, and passed on without what the app did not ask for.

Bytes in, bytes out. Knows OpenAI's chunks; never opens a socket.
"""

from typing import Any

import msgspec

from proxy.call import NULL, Choice
from proxy.wire.chat_answer import Wants, prompt_tokens_of, read_ids, read_logprobs, strip_choice, strip_top
from proxy.wire.chunks import ChunkStream
from proxy.wire.dialect import Heard, raw, read_index, read_text

_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_EMPTY_DELTAS = (b"{}", b"null")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | list[Any] | None = None
    """Parts, from some other servers: their text is not put together."""
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


_delta = msgspec.json.Decoder(_Delta | None)


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
        self.finish_reason = read_text(choice.get("finish_reason", NULL)) or self.finish_reason
        delta = _delta.decode(choice.get("delta", NULL))
        if delta is None:
            return
        self.role = delta.role or self.role
        for part in ("content", "reasoning", "refusal"):
            if isinstance(text := getattr(delta, part), str):
                self.texts.setdefault(part, []).append(text)
        for piece in delta.tool_calls or ():
            self._hear_tool_call(piece)

    def _hear_tool_call(self, piece: _ToolCall) -> None:
        call = self.tool_calls.setdefault(piece.index, {"id": None, "type": "function", "function": {}})
        call["id"] = piece.id or call["id"]
        spoken = piece.function or _Function()
        if spoken.name:
            call["function"]["name"] = spoken.name
        call["function"]["arguments"] = call["function"].get("arguments", "") + (spoken.arguments or "")

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


class ChatStream(ChunkStream):
    """One streamed chat answer."""

    def __init__(self, wants: Wants) -> None:
        super().__init__()
        self._wants = wants
        self._spoken: dict[int, _Spoken] = {}
        self._prompt_token_ids: list[int] | None = None
        self._prompt_tokens: int | None = None

    @property
    def heard(self) -> tuple[Heard, ...]:
        """What was spoken so far."""
        choices = tuple(self._spoken[index].frozen(index) for index in sorted(self._spoken))
        return (Heard(self._prompt_token_ids, self._prompt_tokens, choices),)

    def _take(self, fields: dict[str, msgspec.Raw]) -> bool:
        choices = _objects.decode(fields["choices"]) if "choices" in fields else []
        if "prompt_token_ids" in fields and self._prompt_token_ids is None:
            self._prompt_token_ids = read_ids(fields["prompt_token_ids"])
        if fields.get("usage", NULL) != NULL:
            self._prompt_tokens = prompt_tokens_of(fields["usage"])
        exists_without_capture = not choices
        for choice in choices:
            self._spoken.setdefault(read_index(choice["index"]), _Spoken()).hear(choice)
            strip_choice(choice, self._wants)
            # vLLM alone sends no event for a token that adds nothing: no text, no end.
            silent = bytes(choice.get("delta", NULL)) in _EMPTY_DELTAS and choice.get("finish_reason", NULL) == NULL
            exists_without_capture |= not silent or self._wants.wants_logprobs or self._wants.wants_token_ids
        if exists_without_capture:
            strip_top(fields, self._wants)
            if "choices" in fields:
                fields["choices"] = raw(choices)
        return exists_without_capture
