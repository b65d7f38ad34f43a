"""Find which line of a log continues which, by the hashes that the proxy uses for continuations."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from whetstone.domain.conversation_hash import HASH_BYTES, MessageReader, Turn, lookup_keys
from whetstone.transfer.importing.schema import LogEntry

_KIND = b"whetstone import"
_canonical = msgspec.json.Encoder(order="deterministic").encode


class ConversationHashes(msgspec.Struct, frozen=True, gc=False):
    """The hashes of a conversation of a log, message by message."""

    turns: Sequence[Turn]
    exact: Sequence[bytes]
    """For each message, the hash of the conversation up to and including it, with all text that `proxy.normalise`
    matches: what is imported must not depend on that setting."""

    def continuation_keys(self, answer: int) -> list[bytes]:
        """Return the continuation keys of the completion that this answer continues, the most reliable first."""
        return lookup_keys(self.turns[:answer])

    def tool_calls(self, answer: int) -> bytes | None:
        """Return the key of these that is made of tool calls."""
        last = next((turn for turn in reversed(self.turns[:answer]) if turn.history is not None), None)
        return None if last is None else last.tool_history

    def is_exact(self, place: int) -> bool:
        """Return whether no text was left out of the hash up to this position."""
        return self.turns[place].whole == self.exact[place]


class Histories:
    """Reads conversations of a log."""

    def __init__(self, patterns: Sequence[str] = (), timeout_s: float = 0.05) -> None:
        """`patterns`: the setting `proxy.normalise`."""
        self._reader = MessageReader(patterns, timeout_s)
        self._exact = MessageReader()

    def of(self, entry: LogEntry) -> ConversationHashes:
        """Hash a line's conversation. It belongs to its end user: an imported call has no key, and other callers do not
        find it."""
        messages = entry.messages if entry.as_logged is None else entry.as_logged
        turns = self._reader.turns(messages, entry.tags.end_user)
        exact = self._exact.turns(messages, None) if self._reader.has_patterns else turns
        return ConversationHashes(turns, [turn.whole for turn in exact])


def digest(*parts: Any) -> str:
    """Return 32 hex digits, the hash of values that JSON can represent."""
    return hashlib.blake2b(_canonical(parts), digest_size=HASH_BYTES, person=_KIND).hexdigest()
