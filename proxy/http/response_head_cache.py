"""Recognise the head of a server's answer that came before, except for what differs in each: its body's length, its
date.

Pure. A head is learned only after the parser has read one like it, and only if it is the plain form of what the parser
read. So later answers can differ from it only in values that do not affect how an answer is read, and in a length that
must match the body.
"""

import re
from collections.abc import Mapping

MOST_BYTES = 4096
"""Largest head that is cached."""
MOST_BODY_BYTES = 128 * 2**10
"""Largest body of a known answer. A longer one seldom arrives in one read, and may make its server wait."""
_LENGTH = b"content-length"
_OWN = frozenset({b"date", b"x-request-id"})
"""Headers that differ in each answer, and that the proxy does not read."""
_SPECIAL = frozenset({b"content-encoding", b"transfer-encoding", b"trailer", b"upgrade"})
"""Headers that change how an answer is read."""
_END = b"\r\n\r\n"
_line = re.compile(rb"([!-9;-~]+): ([!-~](?:[ -~]*[!-~])?)").fullmatch


class KnownAnswer:
    """A cached head, of an answer with status 200 after which the connection stays open. `learn` creates it."""

    __slots__ = ("_match", "came_again", "content_type", "headers")

    def __init__(self, pattern: bytes, headers: dict[bytes, bytes], content_type: str) -> None:
        """`pattern` matches a whole answer. Its groups are the stated length and the body."""
        self._match = re.compile(pattern, re.DOTALL).fullmatch
        self.headers = headers
        """By name in lower case, without those that differ in each answer."""
        self.content_type = content_type
        """Without parameters."""
        self.came_again = False

    def body(self, data: bytes) -> bytes | None:
        """Return the body of a whole answer with this head. None if the head differs, data is missing or too much, or
        the body is empty."""
        found = self._match(data)
        if found is None:
            return None
        length, body = found.groups()
        if length != b"%d" % len(body):
            return None
        self.came_again = True
        return body


def learn(data: bytes, headers: Mapping[bytes, bytes], content_type: str) -> KnownAnswer | None:
    """Return the head that `data` begins with: a whole answer with status 200, from which the parser has read
    `headers`. None if it is not a plain one, is too long, or `data` holds more than one answer."""
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
    """Return the pattern that matches a header's line."""
    if name.lower() == _LENGTH:
        return re.escape(name) + rb": ([0-9]+)"
    return re.escape(name) + b": " + (rb"[ -~]*" if name.lower() in _OWN else re.escape(value))
