"""Server-sent events: cut out of a stream of bytes. Knows the grammar and no dialect."""

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 16 * 2**20
"""Longest event: what is cut off anew with each piece that comes must not grow for ever."""


class Events:
    """Cuts what comes into whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they come; return the events that are whole now, without the empty line that ends each.

        Raises:
            ValueError: an event has no end.
        """
        data = self._rest + data
        if data.find(b"\r") >= 0:
            # Another server may end its lines so; what is cut in the middle of one is put right with what follows.
            held = data.endswith(b"\r")
            data = data[:-1].replace(b"\r\n", b"\n") + b"\r" if held else data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"it is over {MAX_EVENT_BYTES} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """An event's data; None where it has none (a comment)."""
    if event.startswith(b"data: "):
        return event[6:]
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            return line[5:].lstrip(b" ")
    return None
