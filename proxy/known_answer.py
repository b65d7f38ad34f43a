"""The head of a server's answer that came before, but for what is each answer's own: its body's length, its date.

Pure; knows how HTTP/1.1 writes a head, no connection. A head is known only after the parser has read one like it, and
only if it was what it read, written plainly: what differs from that one then are values that say nothing of how an
answer is read, and a length that is the body's.
"""

import re
from collections.abc import Mapping

MOST_BYTES = 4096
"""Of a head that is kept."""
MOST_BODY_BYTES = 128 * 2**10
"""Of a known answer: one that is longer seldom comes in one read, and may have its server wait."""
_LENGTH = b"content-length"
_OWN = frozenset({b"date", b"x-request-id"})
"""Headers that are others in each answer, and that nobody here asks for."""
_SPECIAL = frozenset({b"content-encoding", b"transfer-encoding", b"trailer", b"upgrade"})
"""Headers that have an answer read in another way."""
_END = b"\r\n\r\n"
_line = re.compile(rb"([!-9;-~]+): ([!-~](?:[ -~]*[!-~])?)").fullmatch


class KnownAnswer:
    """One such head, of an answer with status 200 behind which the connection stays. `learn` makes them."""

    __slots__ = ("_match", "came_again", "content_type", "headers")

    def __init__(self, pattern: bytes, headers: dict[bytes, bytes], content_type: str) -> None:
        """`pattern`: of a whole answer; its groups are the length that it says it has, and its body."""
        self._match = re.compile(pattern, re.DOTALL).fullmatch
        self.headers = headers
        """By their names in lower case, but for what is each answer's own."""
        self.content_type = content_type
        """Without parameters."""
        self.came_again = False

    def body(self, data: bytes) -> bytes | None:
        """The body of an answer with this head, all of which is there; None where it is another, or more, or less, or
        has no body."""
        found = self._match(data)
        if found is None:
            return None
        length, body = found.groups()
        if length != b"%d" % len(body):
            return None
        self.came_again = True
        return body


def learn(data: bytes, headers: Mapping[bytes, bytes], content_type: str) -> KnownAnswer | None:
    """Know the head again with which `data` begins: a whole answer with status 200, of which the parser has read
    `headers`. None: it is no plain one, or a long one, or there is more than one answer."""
    end = data.find(_END, 0, MOST_BYTES)
    if end < 0:
        return None
    first, *lines = data[:end].split(b"\r\n")
    pairs = [found.groups() for line in lines if (found := _line(line))]
    read = {name.lower(): value for name, value in pairs}
    if len(read) < len(lines) or read != headers or not _SPECIAL.isdisjoint(read):
        return None
    if read.get(_LENGTH) != b"%d" % (len(data) - end - len(_END)):
        return None
    body = rb"\r\n(.{1,%d})" % MOST_BODY_BYTES
    patterns = [re.escape(first), *(_pattern(name, value) for name, value in pairs), body]
    common = {name: value for name, value in read.items() if name != _LENGTH and name not in _OWN}
    return KnownAnswer(rb"\r\n".join(patterns), common, content_type)


def _pattern(name: bytes, value: bytes) -> bytes:
    """Of a header's line."""
    if name.lower() == _LENGTH:
        return re.escape(name) + rb": ([0-9]+)"
    return re.escape(name) + b": " + (rb"[ -~]*" if name.lower() in _OWN else re.escape(value))
