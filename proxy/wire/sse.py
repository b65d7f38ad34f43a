"""Split a stream of bytes into server-sent events. Pure.

`ChunkStream` processes what OpenAI's chat and text streams share: chunks of JSON until `[DONE]`.
"""

from abc import ABC, abstractmethod

import msgspec

from proxy.domain.call import NULL
from proxy.wire.interfaces import encode, read_object, read_text

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


class ChunkStream(ABC):
    """The state of one streamed answer (`interfaces.Stream`), except for the content of its chunks."""

    def __init__(self) -> None:
        self._events = Events()
        self.upstream_id: str | None = None
        self.error: str | None = None
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrive. Return the events for the app, possibly none."""
        events = self._events.feed(data)
        return self._pass(events[0]) if len(events) == 1 else b"".join(map(self._pass, events))

    def last(self) -> bytes:
        """Return `[DONE]`, in vLLM's form."""
        return DONE_EVENT

    @abstractmethod
    def _take(self, fields: dict[str, msgspec.Raw]) -> bool:
        """Record a chunk and strip it in place. Return whether vLLM would have sent it without capture."""

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
            self.upstream_id = read_text(fields["id"])
        return b"data: " + encode(fields) + b"\n\n" if self._take(fields) else b""
