"""Recognise the head of a request that came before, except for its body's length: an app sends the same one repeatedly.

Pure. A head is learned only after the parser has read exactly those bytes, and only if they are the plain form of what
it read. So a request is never read here in another way than the parser would read it (RFC 9112, 11.2).
"""

from proxy.http.asgi import HEADERS, NOTES, Header, Scope

MOST_BYTES = 4096
"""Largest head that is cached, with its API key, as long as its connection lives."""
MOST_DIGITS = 15
"""Most digits of a body's length: fewer than the parser counts to."""
_LENGTH = b"content-length"
_SPECIAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer"})
"""Headers that change how a request is read."""
_ZERO = ord("0")


class KnownHead:
    """A cached head. `learn` creates it."""

    __slots__ = ("_after", "_before", "_begin", "_by_name", "_headers", "_place", "_scope")

    def __init__(self, before: bytes, after: bytes, scope: Scope, headers: list[Header], place: int) -> None:
        """`before` and `after` surround the body's length, which is the header at `place`. `scope` is what requests
        with this head have in common."""
        self._before, self._begin, self._after = before, len(before), after
        # Include the keys that each request sets: changing a key costs less than adding one.
        self._scope = {**scope, NOTES: {}, "headers": None, HEADERS: None, "state": None}
        self._headers, self._place = headers, place
        self._by_name = dict(headers)

    def match(self, data: bytes) -> tuple[Scope, bytes, int] | None:
        """Match a request that begins with this head. Return its scope, its body as far as it has arrived, and how many
        bytes are missing. None if the head differs, or `data` holds more than one request."""
        if not data.startswith(self._before):
            return None
        head, after, body = data.partition(self._after)
        digits = head[self._begin :]
        if not (after and digits.isdigit() and digits[0] != _ZERO and len(digits) <= MOST_DIGITS):
            return None
        missing = int(digits) - len(body)
        if missing < 0:
            return None
        # Copies: each request may change its own.
        scope, headers, by_name = self._scope.copy(), self._headers.copy(), self._by_name.copy()
        headers[self._place] = (_LENGTH, digits)
        by_name[_LENGTH] = digits
        scope["headers"], scope[HEADERS], scope["state"] = headers, by_name, {}
        return scope, body, missing


def learn(data: bytes, url: bytes, scope: Scope, most_bytes: int) -> KnownHead | None:
    """Return the head that `data` begins with, from which the parser has read `url` and `scope`. None if it is not a
    plain one, is over `most_bytes`, or more data follows the request."""
    headers: list[Header] = scope["headers"]
    names = [name for name, _ in headers]
    if scope["method"] != "POST" or names.count(_LENGTH) != 1 or not _SPECIAL.isdisjoint(names):
        return None
    place = names.index(_LENGTH)
    length = headers[place][1]
    lines = [b"POST %b HTTP/1.1" % url, *map(b": ".join, headers)]
    head = b"\r\n".join((*lines, b"", b""))
    size = len(head)
    if size > min(most_bytes, MOST_BYTES) or data[:size].lower() != head.lower():
        return None
    if not length.isdigit() or len(length) > MOST_DIGITS or len(data) > size + int(length):
        return None
    end = len(b"\r\n".join(lines[: place + 2]))
    common = {name: value for name, value in scope.items() if name in _COMMON}
    return KnownHead(data[: end - len(length)], data[end:size], common, headers.copy(), place)


_COMMON = frozenset(
    {
        "type", "asgi", "server", "client", "scheme", "root_path",
        "path", "raw_path", "query_string", "http_version", "method",
    }
)  # fmt: skip
"""Keys of a scope that requests with one head have in common."""
