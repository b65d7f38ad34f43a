"""Process a streamed chat answer event by event: capture it, and pass it on without what the app did not request.

Bytes in, bytes out. Most events of a stream differ only in their one choice. The bytes before and after it are
compared, and its fields are decoded by a type with exactly these names, which a server writes in one order: a few
microseconds each. A chunk that differs in any other way is read field by field.
"""

from collections import defaultdict
from functools import lru_cache
from keyword import iskeyword
from typing import Any, Protocol

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.decoding import (
    ChoiceLogprobs,
    ChunkStream,
    Number,
    decode,
    encode,
    logprobs_of,
    raw,
    read_ids,
    read_index,
    read_logprobs,
    read_object,
    read_objects,
    read_text,
    usage_of,
)
from proxy.wire.interfaces import PromptResult

CAPTURED: dict[str, Any] = {
    "logprobs": ChoiceLogprobs | None,
    "token_ids": list[Number] | None,
    "prompt_token_ids": list[Number] | None,
}
"""Fields that capture requests. They are decoded where they are hidden from the app; all else passes as it came."""
MOST_TRIES = 8
"""Most chunks learned in a row without a match. After that, this stream has no such chunks."""
NEEDED = frozenset({"index", "delta", "finish_reason", "logprobs"})
"""Fields that a choice must have to be read as one of many similar chunks."""
_CHOICES = b'"choices":['
_EMPTY_DELTAS = (b"{}", b"null")
LONGEST_EMPTY = max(map(len, _EMPTY_DELTAS))


class Visibility(Protocol):
    """Which parts of an answer the app requested."""

    model: str
    hides_reasoning: bool
    wants_logprobs: bool
    wants_token_ids: bool
    wants_prompt_token_ids: bool
    hides_usage: bool


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


class GrowingChoice:
    """One choice as it grows."""

    def __init__(self) -> None:
        self.role = "assistant"
        self.texts: defaultdict[str, list[str]] = defaultdict(list)
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

    def add_delta(self, encoded: msgspec.Raw) -> None:
        """Add more of the message."""
        delta = _delta.decode(encoded)
        if delta is None:
            return
        self.role = delta.role or self.role
        if isinstance(delta.content, str):
            self.texts["content"].append(delta.content)
        if delta.reasoning is not None:
            self.texts["reasoning"].append(delta.reasoning)
        if delta.refusal is not None:
            self.texts["refusal"].append(delta.refusal)
        for piece in delta.tool_calls or ():
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


class ChunkTemplate:
    """What the last chunk read field by field has in common with those that follow."""

    __slots__ = ("_after", "_before", "_begins", "_decode", "_ends", "_hidden", "_left", "has_ids", "output_after",
                 "output_before")  # fmt: skip

    def __init__(self, hidden: frozenset[str]) -> None:
        """`hidden`: fields of a choice that are not passed on to the app."""
        self._hidden = hidden
        self._before, self._after = b"", b""
        self._begins, self._ends = 0, 0
        self.has_ids = False
        """Whether the similar choices have a field for their ids."""
        self.output_before, self.output_after = b"", b""
        """What surrounds the choice in the output, including the empty line."""
        self._decode: Any = None
        self._left = MOST_TRIES

    def fit(self, event: bytes, output: bytes, names: tuple[str, ...]) -> None:
        """Learn a chunk with one choice as the template for those that follow.

        `event` is the chunk as it came and `output` as it goes out, both without the empty line. `names` are the
        choice's fields in the order in which they came.
        """
        self._decode = None
        if self._left <= 0 or not NEEDED.issubset(names) or not all(map(may_be_named, names)):
            return
        self._left -= 1
        came, goes = _parts(event), _parts(output)
        if came is not None and goes is not None:
            self._before, self._after = came
            self._begins, self._ends = len(self._before), -len(self._after)
            self.output_before, self.output_after = goes[0], goes[1] + b"\n\n"
            self.has_ids = "token_ids" in names
            self._decode = _decoder(names, self._hidden)

    def match(self, event: bytes) -> Any:
        """Return the choice of a chunk that matches, else None. `index` is a number; `token_ids` and `logprobs` are
        decoded if they are hidden; all else is Raw."""
        if self._decode is None or not (event.startswith(self._before) and event.endswith(self._after)):
            return None
        try:
            choice = self._decode(event[self._begins : self._ends])
        except msgspec.DecodeError:
            return None
        self._left = MOST_TRIES
        return choice


def _parts(event: bytes) -> tuple[bytes, bytes] | None:
    """Return what stands before and after the one choice, or None if that is unclear."""
    at = event.find(_CHOICES)
    before = event[: at + len(_CHOICES)]
    if at < 0 or not before.startswith(b"data: {"):
        return None
    try:
        # If it parses with an empty list, this is the top level of the chunk, and not a text that looks like it.
        read_object(before[len(b"data: ") :] + b"]}")
        fields = read_object(event[len(b"data: ") :])
    except msgspec.DecodeError:
        return None
    names = list(fields)
    behind = {name: fields[name] for name in names[names.index("choices") + 1 :]}
    if any(value != NULL for value in behind.values()):
        return None
    after = b"]" + b"".join(b",%b:null" % encode(name) for name in behind) + b"}"
    return (before, after) if event.endswith(b"}" + after) else None


def may_be_named(name: str) -> bool:
    """Return whether a type may have a field with this name."""
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


def struct_of(name: str, names: tuple[str, ...], types: dict[str, Any]) -> type[msgspec.Struct]:
    """Return a type with exactly these fields. Those without a type pass as they came."""
    fields = [(field, types.get(field, msgspec.Raw)) for field in names]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, gc=False)


def strip_choice(choice: dict[str, msgspec.Raw], visibility: Visibility) -> None:
    """Remove from a choice what capture added, leaving the nulls that vLLM would have sent without it."""
    if not visibility.wants_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not visibility.wants_logprobs:
        choice["logprobs"] = NULL
    if visibility.hides_reasoning:
        _hide_reasoning(choice)


def _hide_reasoning(choice: dict[str, msgspec.Raw]) -> None:
    """Hide the reasoning as vLLM does: null in its place, and an empty delta if it holds nothing else."""
    part = "delta" if "delta" in choice else "message"
    fields: dict[str, Any] = decode(choice[part])
    if part == "message" or fields.get("content") or fields.get("tool_calls"):
        choice[part] = raw(fields | {"reasoning": None})
    elif "role" not in fields:
        choice[part] = raw({})


def strip_top(fields: dict[str, msgspec.Raw], visibility: Visibility) -> None:
    """Do the same for the answer's top-level fields, and set `model` to the name that the app requested."""
    if not visibility.wants_prompt_token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    if "model" in fields:
        fields["model"] = raw(visibility.model)


@lru_cache(64)
def _decoder(names: tuple[str, ...], hidden: frozenset[str]) -> Any:
    types = {"index": Number} | {name: CAPTURED[name] for name in hidden}
    return msgspec.json.Decoder(struct_of("Choice", names, types)).decode


class ChatStream(ChunkStream):
    """The state of one streamed chat answer."""

    def __init__(self, visibility: Visibility) -> None:
        super().__init__()
        self._visibility = visibility
        self._shows_ids, self._shows_logprobs = visibility.wants_token_ids, visibility.wants_logprobs
        self._shows_more = self._shows_ids or self._shows_logprobs
        """The app also sees events that add nothing to the text."""
        self._choices: dict[int, GrowingChoice] = {}
        self._prompt_token_ids: list[int] | None = None
        self._usage: tuple[int | None, int | None] = None, None
        """Tokens of the prompt and of all choices."""
        shown = {"logprobs": self._shows_logprobs, "token_ids": self._shows_ids}
        self._template = ChunkTemplate(frozenset(name for name in shown if not shown[name]))
        self._names: tuple[str, ...] = ()
        """Field names of the choice in the last chunk, if it was the only one and others may be like it."""

    @property
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far."""
        choices = tuple(self._choices[index].frozen(index) for index in sorted(self._choices))
        read, answered = self._usage
        return (PromptResult(self._prompt_token_ids, read, choices, 0, answered),)

    def _pass(self, event: bytes) -> bytes:
        template = self._template
        choice = template.match(event)
        if choice is None:
            return self._pass_other(event)
        # The same as `_take` for a single choice, in a chunk like the one before.
        growing = self._choices.get(choice.index)
        if growing is None:
            growing = self._choices[choice.index] = GrowingChoice()
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
        return template.output_before + encode(choice) + template.output_after

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
        has_usage = fields.get("usage", NULL) != NULL
        if has_usage:
            self._usage = usage_of(fields["usage"])
        if len(choices) == 1 and not self._visibility.hides_reasoning:
            self._names = tuple(choices[0])
        exists_without_capture = not choices and not (has_usage and self._visibility.hides_usage)
        for choice in choices:
            self._choices.setdefault(read_index(choice["index"]), GrowingChoice()).add(choice)
            strip_choice(choice, self._visibility)
            # Without capture, vLLM sends no event for a token that adds neither text nor an end.
            silent = bytes(choice.get("delta", NULL)) in _EMPTY_DELTAS and choice.get("finish_reason", NULL) == NULL
            exists_without_capture |= not silent or self._shows_more
        if exists_without_capture:
            strip_top(fields, self._visibility)
            if "choices" in fields:
                fields["choices"] = raw(choices)
        return exists_without_capture
