"""Which line of a log goes on from which, by the hashes that the proxy threads by. Pure; knows no table."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from whetstone.conversations import HASH_BYTES, MessageReader, Turn, found_by
from whetstone.imported_lines import Logged

_KIND = b"whetstone import"
_canonical = msgspec.json.Encoder(order="deterministic").encode


class Read(msgspec.Struct, frozen=True, gc=False):
    """A conversation of a log as hashes, message by message."""

    turns: Sequence[Turn]
    exact: Sequence[bytes]
    """Of each message the hash of the conversation up to and with it, with all that `proxy.normalise` matches: what is
    imported must not change with that setting."""

    def found_by(self, answer: int) -> list[bytes]:
        """All that the completion may be found by which the answer at that place goes on from, the surest first."""
        return found_by(self.turns[:answer])

    def tool_calls(self, answer: int) -> bytes | None:
        """The one of these that is of tool calls."""
        last = next((turn for turn in reversed(self.turns[:answer]) if turn.history is not None), None)
        return None if last is None else last.tool_history

    def is_exact(self, place: int) -> bool:
        """Whether up to there no text was left out of the hash."""
        return self.turns[place].whole == self.exact[place]


class Histories:
    """Reads conversations of a log."""

    def __init__(self, patterns: Sequence[str] = (), timeout_s: float = 0.05) -> None:
        """`patterns`: the setting `proxy.normalise`."""
        self._reader = MessageReader(patterns, timeout_s)
        self._exact = MessageReader()

    def of(self, logged: Logged) -> Read:
        """A line's conversation. It is its user's: an imported call has no key, and other callers do not find it."""
        messages = logged.messages if logged.as_logged is None else logged.as_logged
        turns = self._reader.turns(messages, logged.tags.end_user)
        exact = self._exact.turns(messages, None) if self._reader.has_patterns else turns
        return Read(turns, [turn.whole for turn in exact])


def digest(*parts: Any) -> str:
    """32 hex digits of what JSON can say."""
    return hashlib.blake2b(_canonical(parts), digest_size=HASH_BYTES, person=_KIND).hexdigest()
