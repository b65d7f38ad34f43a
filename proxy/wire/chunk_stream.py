"""Process what OpenAI's chat and text streams share: chunks of JSON until `[DONE]`. Pure."""

from abc import ABC, abstractmethod

import msgspec

from proxy.domain.call import NULL
from proxy.wire.interfaces import read_object, read_text
from proxy.wire.sse import DONE, DONE_EVENT, Events, data_of


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
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" if self._take(fields) else b""
