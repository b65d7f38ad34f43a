"""Decode what a server sends: a stream's events, pieces of JSON, and what it reports about tokens. Pure."""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Annotated, Any

import msgspec

from proxy.domain.call import NULL
from proxy.wire.interfaces import PromptResult

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 2**20
"""Longest event. An unfinished event is scanned again with each piece that arrives, so it must not grow without end."""

LARGEST_NUMBER = 2**31 - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
"""A token id, or a choice's index: what SQL's integers hold."""

decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode
read_text = msgspec.json.Decoder(str | None).decode
"""Decodes a piece of JSON that is a text or null."""
read_index = msgspec.json.Decoder(Number).decode
"""Decodes a piece of JSON that is a choice's index."""
read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""Splits a list into its items, as they came."""
read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Splits an object into its fields, as they came."""
read_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
"""Splits each object of a list into its fields."""


def raw(value: Any) -> msgspec.Raw:
    """Return the value as a piece of JSON."""
    return msgspec.Raw(encode(value))


raw_name = lru_cache(256)(raw)
"""The same, cached: for names that come again and again."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Number | None = None
    completion_tokens: Any = None


class TokenLogprob(msgspec.Struct, gc=False):
    """The logprob of one sampled token, in nats."""

    logprob: float


class ChoiceLogprobs(msgspec.Struct, gc=False):
    """The part of a choice's logprobs that is recorded."""

    content: list[TokenLogprob] | None = None


_ids = msgspec.json.Decoder(list[Number] | None)
_logprobs = msgspec.json.Decoder(ChoiceLogprobs | None)
_usage = msgspec.json.Decoder(_Usage | None)


def read_ids(piece: msgspec.Raw | None) -> list[int] | None:
    """Return token ids as vLLM sends them, or None if it sent none."""
    return None if piece is None else _ids.decode(piece)


def read_logprobs(piece: msgspec.Raw | None) -> list[float] | None:
    """Return one logprob per sampled token, in nats, or None if vLLM sent none."""
    return None if piece is None else logprobs_of(_logprobs.decode(piece))


def logprobs_of(logprobs: ChoiceLogprobs | None) -> list[float] | None:
    """Return a choice's logprobs, one per sampled token, or None if vLLM sent none."""
    if logprobs is None or logprobs.content is None:
        return None
    content = logprobs.content
    # An event of a stream usually holds one token.
    return [content[0].logprob] if len(content) == 1 else [token.logprob for token in content]


def usage_of(piece: msgspec.Raw | None) -> tuple[int | None, int | None]:
    """Return the number of prompt tokens and of answer tokens from the usage; None where it was not reported."""
    usage = None if piece is None else _usage.decode(piece)
    return (None, None) if usage is None else (usage.prompt_tokens, count_of(usage.completion_tokens))


def count_of(value: Any) -> int | None:
    """Return a number of tokens that another server reports; None if it is no number that a column can hold."""
    return value if type(value) is int and 0 <= value <= LARGEST_NUMBER else None


class Events:
    """Splits incoming bytes into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they arrive. Return the events that are now whole, without the empty line that ends each.

        Raises:
            ValueError: an event does not end.
        """
        data = self._rest + data
        if data.find(b"\r") >= 0:
            # Another server may end its lines with CRLF. If one is split between two pieces, the next call joins it.
            splits_crlf = data.endswith(b"\r")
            data = data[:-1].replace(b"\r\n", b"\n") + b"\r" if splits_crlf else data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"it is over {MAX_EVENT_BYTES} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """Return an event's data, or None if it has none (a comment)."""
    if event.startswith(b"data: "):
        return event[6:]
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            return line[5:].lstrip(b" ")
    return None


class Stream(ABC):
    """One streamed answer: `feed` it what upstream sends, and send the app what it returns."""

    def __init__(self) -> None:
        self._events = Events()
        self.upstream_id: str | None = None
        """The answer's id, as the app sees it; None until it was sent."""
        self.error: str | None = None
        """The error that upstream reported within the stream."""
        self.stored: dict[str, Any] | None = None
        """The same as `Answer.stored`, after `last`."""
        self.done = False
        """Whether upstream has sent its last event. The event that ends the stream for the app waits until the call is
        recorded."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrive, whole events or not. Return the events for the app, possibly none.

        Raises:
            UNREADABLE: an event is not in its dialect.
        """
        events = self._events.feed(data)
        return self._pass(events[0]) if len(events) == 1 else b"".join(map(self._pass, events))

    @property
    @abstractmethod
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far."""

    @abstractmethod
    def last(self) -> bytes:
        """Return what ends the stream for the app, once it is done."""

    @abstractmethod
    def _pass(self, event: bytes) -> bytes:
        """Record an event. Return the event for the app, or nothing."""


class ChunkStream(Stream):
    """What OpenAI's chat and text streams share: chunks of JSON until `[DONE]`."""

    def last(self) -> bytes:
        """Return `[DONE]`, in vLLM's form."""
        return DONE_EVENT

    @abstractmethod
    def _take(self, fields: dict[str, msgspec.Raw]) -> bool:
        """Record a chunk and strip it in place. Return whether vLLM would have sent it without capture."""

    def _named(self, upstream_id: str | None) -> str | None:
        """Return the id as the dialect writes it."""
        return upstream_id

    def _pass(self, event: bytes) -> bytes:
        data = data_of(event)
        if data == DONE:
            self.done = True
            return b""
        if data is None or not data.startswith(b"{"):
            return event + b"\n\n"
        fields = read_object(data)
        if fields.get("error", NULL) != NULL:
            self.error = bytes(fields["error"]).decode()
            return event + b"\n\n"
        if self.upstream_id is None and "id" in fields:
            self.upstream_id = self._named(read_text(fields["id"]))
        return b"data: " + encode(fields) + b"\n\n" if self._take(fields) else b""
