"""Split a stream of bytes into server-sent events."""

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
