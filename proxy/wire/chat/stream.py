"""Process a streamed chat answer event by event: capture it, and pass it on without what the app did not request.

Bytes in, bytes out.
"""

from typing import Any

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.chat.answer import Visibility, strip_choice, strip_top
from proxy.wire.chat.chunk_template import ChunkTemplate
from proxy.wire.chunk_stream import ChunkStream
from proxy.wire.interfaces import PromptResult, raw, read_index, read_objects, read_text
from proxy.wire.tokens import logprobs_of, prompt_tokens_of, read_ids, read_logprobs

_encode = msgspec.json.Encoder().encode
_EMPTY_DELTAS = (b"{}", b"null")
LONGEST_EMPTY = max(map(len, _EMPTY_DELTAS))


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | list[Any] | None = None
    """A list of parts, from some other servers: their text is not joined."""
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


_delta = msgspec.json.Decoder(_Delta | None)


class _GrowingChoice:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: dict[str, list[str]] = {}
        self.tool_calls: dict[int, dict[str, Any]] = {}
        self.token_ids: list[int] | None = None
        self.logprobs: list[float] | None = None
        self.finish_reason: str | None = None

    def add(self, choice: dict[str, msgspec.Raw]) -> None:
        self.add_tokens(read_ids(choice.get("token_ids")), read_logprobs(choice.get("logprobs")))
        self.finish_reason = read_text(choice.get("finish_reason", NULL)) or self.finish_reason
        self.add_delta(choice.get("delta", NULL))

    def add_tokens(self, token_ids: list[int] | None, logprobs: list[float] | None) -> None:
        """Add more tokens."""
        if token_ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids += token_ids
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += logprobs

    def add_delta(self, piece: msgspec.Raw) -> None:
        """Add more of the message."""
        delta = _delta.decode(piece)
        if delta is None:
            return
        if delta.role:
            self.role = delta.role
        if isinstance(delta.content, str):
            self._more("content", delta.content)
        if delta.reasoning is not None:
            self._more("reasoning", delta.reasoning)
        if delta.refusal is not None:
            self._more("refusal", delta.refusal)
        if delta.tool_calls:
            for call in delta.tool_calls:
                self._add_tool_call(call)

    def _more(self, part: str, text: str) -> None:
        texts = self.texts.get(part)
        if texts is None:
            self.texts[part] = [text]
        else:
            texts.append(text)

    def _add_tool_call(self, piece: _ToolCall) -> None:
        call = self.tool_calls.setdefault(piece.index, {"id": None, "type": "function", "function": {}})
        call["id"] = piece.id or call["id"]
        function = piece.function or _Function()
        if function.name:
            call["function"]["name"] = function.name
        call["function"]["arguments"] = call["function"].get("arguments", "") + (function.arguments or "")

    def frozen(self, index: int) -> Choice:
        message: dict[str, Any] = {"role": self.role}
        message |= {part: "".join(texts) for part, texts in self.texts.items()}
        if self.tool_calls:
            message["tool_calls"] = [self.tool_calls[place] for place in sorted(self.tool_calls)]
        return Choice(
            index=index,
            message=message,
            finish_reason=self.finish_reason,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
        )


class ChatStream(ChunkStream):
    """The state of one streamed chat answer."""

    def __init__(self, visibility: Visibility) -> None:
        super().__init__()
        self._visibility = visibility
        self._shows_ids, self._shows_logprobs = visibility.wants_token_ids, visibility.wants_logprobs
        self._shows_more = self._shows_ids or self._shows_logprobs
        """The app also sees events that add nothing to the text."""
        self._choices: dict[int, _GrowingChoice] = {}
        self._prompt_token_ids: list[int] | None = None
        self._prompt_tokens: int | None = None
        hidden = {"logprobs": self._shows_logprobs, "token_ids": self._shows_ids}
        self._template = ChunkTemplate(frozenset(name for name, wanted in hidden.items() if not wanted))
        self._names: tuple[str, ...] = ()
        """Field names of the choice in the last chunk, if it was the only one and others may be like it."""

    @property
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far."""
        choices = tuple(self._choices[index].frozen(index) for index in sorted(self._choices))
        return (PromptResult(self._prompt_token_ids, self._prompt_tokens, choices),)

    def _pass(self, event: bytes) -> bytes:
        template = self._template
        choice = template.match(event)
        if choice is None:
            return self._pass_other(event)
        # The same as `_take` for a single choice, in a chunk like the one before.
        growing = self._choices.get(choice.index)
        if growing is None:
            growing = self._choices[choice.index] = _GrowingChoice()
        ids, logprobs = choice.token_ids if template.has_ids else None, choice.logprobs
        if self._shows_ids:
            ids = read_ids(ids)
        elif ids is not None:
            choice.token_ids = None
        if self._shows_logprobs:
            logprobs = read_logprobs(logprobs)
        elif logprobs is not None:
            logprobs = logprobs_of(logprobs)
            choice.logprobs = None
        growing.add_tokens(ids, logprobs)
        delta, unfinished = choice.delta, choice.finish_reason == NULL
        if not unfinished:
            growing.finish_reason = read_text(choice.finish_reason) or growing.finish_reason
        growing.add_delta(delta)
        if unfinished and not self._shows_more and len(delta) <= LONGEST_EMPTY and bytes(delta) in _EMPTY_DELTAS:
            return b""
        return template.output_before + _encode(choice) + template.output_after

    def _pass_other(self, event: bytes) -> bytes:
        """Process an event field by field. Learn its form, as the next one may be like it."""
        self._names = ()
        output = super()._pass(event)
        if self._names and output:
            self._template.fit(event, output.removesuffix(b"\n\n"), self._names)
        return output

    def _take(self, fields: dict[str, msgspec.Raw]) -> bool:
        choices = read_objects(fields["choices"]) if "choices" in fields else []
        if "prompt_token_ids" in fields and self._prompt_token_ids is None:
            self._prompt_token_ids = read_ids(fields["prompt_token_ids"])
        if fields.get("usage", NULL) != NULL:
            self._prompt_tokens = prompt_tokens_of(fields["usage"])
        if len(choices) == 1 and not self._visibility.hides_reasoning:
            self._names = tuple(choices[0])
        exists_without_capture = not choices
        for choice in choices:
            self._choices.setdefault(read_index(choice["index"]), _GrowingChoice()).add(choice)
            strip_choice(choice, self._visibility)
            # Without capture, vLLM sends no event for a token that adds neither text nor an end.
            silent = bytes(choice.get("delta", NULL)) in _EMPTY_DELTAS and choice.get("finish_reason", NULL) == NULL
            exists_without_capture |= not silent or self._shows_more
        if exists_without_capture:
            strip_top(fields, self._visibility)
            if "choices" in fields:
                fields["choices"] = raw(choices)
        return exists_without_capture
