"""Split a stream of bytes into server-sent events, and process them one by one. Pure."""

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from proxy.domain.call import NULL
from proxy.wire.interfaces import PromptResult, encode, read_object, read_text

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 2**20
"""Longest event. An unfinished event is scanned again with each piece that arrives, so it must not grow without end."""


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
