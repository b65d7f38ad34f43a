"""The head of a request that came before, but for its body's length: an app says the same one again and again.

Pure; knows how HTTP/1.1 writes a head, no connection. A head is known only after the parser has read those very bytes,
and only if they are what it read, written plainly: so nothing is taken for one request here that it would take for
another (RFC 9112, 11.2).
"""

from proxy.asgi import HEADERS, NOTES, Header, Scope

MOST_BYTES = 4096
"""Of a head that is kept, with its key, as long as its connection."""
MOST_DIGITS = 15
"""Of a body's length: fewer than the parser counts to."""
_LENGTH = b"content-length"
_SPECIAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"trailer"})
"""Headers that have a request read in another way."""
_ZERO = ord("0")


class KnownHead:
    """One such head. `learn` makes them."""

    __slots__ = ("_after", "_before", "_begin", "_by_name", "_headers", "_place", "_scope")

    def __init__(self, before: bytes, after: bytes, scope: Scope, headers: list[Header], place: int) -> None:
        """`before` and `after` its body's length, which is the header at `place`; `scope`: what requests with this head
        have in common."""
        self._before, self._begin, self._after = before, len(before), after
        # With what each request has of its own: to change it costs less than to add it.
        self._scope = {**scope, NOTES: {}, "headers": None, HEADERS: None, "state": None}
        self._headers, self._place = headers, place
        self._by_name = dict(headers)

    def match(self, data: bytes) -> tuple[Scope, bytes, int] | None:
        """A request that begins with this head: its scope, its body as far as it came, and how many bytes of that are
        missing. None: it is another, or more than one."""
        if not data.startswith(self._before):
            return None
        head, after, body = data.partition(self._after)
        digits = head[self._begin :]
        if not (after and digits.isdigit() and digits[0] != _ZERO and len(digits) <= MOST_DIGITS):
            return None
        missing = int(digits) - len(body)
        if missing < 0:
            return None
        # Copies: they are the request's, whatever is done with them.
        scope, headers, by_name = self._scope.copy(), self._headers.copy(), self._by_name.copy()
        headers[self._place] = (_LENGTH, digits)
        by_name[_LENGTH] = digits
        scope["headers"], scope[HEADERS], scope["state"] = headers, by_name, {}
        return scope, body, missing


def learn(data: bytes, url: bytes, scope: Scope, most_bytes: int) -> KnownHead | None:
    """Know the head again with which `data` begins, and of which the parser has read `url` and `scope`; None: it is
    no plain one, over `most_bytes`, or there is more behind its request."""
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
"""Of a scope."""
