"""Hash conversations, so that a request finds the completion that it continues. Pure.

`whetstone.domain.conversation_hash` defines the hashes. This module makes them fast: it caches each message that was
read before.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from proxy.domain.call import NULL, Choice, ContinuationKeys
from proxy.domain.eviction import evict_oldest
from proxy.domain.json_values import canonical, encode_sorted
from whetstone.domain.conversation_hash import HASH_BYTES, MOST_PLACES, MessageReader, hash_of, history_of

SHORT_BYTES, LONG_BYTES = 512, 4096
"""Messages up to SHORT_BYTES are cached by their own bytes. Longer messages are cached by a hash of their bytes, which
takes longer to compute; that hash is cached for the latest messages up to LONG_BYTES."""
MOST_OWNER_BYTES = 256
"""Longest owner name whose places are cached."""

_NO_TASK = encode_sorted([None])


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """A request's conversation as hashes. `answers` and `tool_calls` depend on the owner: another owner gets other
    hashes."""

    owner: bytes
    whole: bytes
    """Hash of all messages, the same for every owner."""
    answers: tuple[bytes, ...]
    """Histories of the prefixes that end with an answer, the longest first."""
    tool_calls: bytes | None
    """Hash of the tool calls in the last answer, ids included; None: it made no tool calls."""
    messages: Sequence[msgspec.Raw] = ()

    @property
    def lookup_keys(self) -> tuple[bytes, ...]:
        """Hashes that may lead to the completion that this conversation continues, the most specific first."""
        return self.answers if self.tool_calls is None else (self.tool_calls, *self.answers)


class _Message(msgspec.Struct, gc=False):
    """A message that was read before, with its hashes."""

    content: bytes
    """Hash of the message's content."""
    is_answer: bool
    tool_calls: bytes | None
    """Hash of the message's tool calls, ids included."""
    before: bytes | None = None
    """Hash of the conversation before this message, where the message was seen last: nearly always the one where it is
    seen again."""
    after: bytes = b""
    """Hash of the conversation up to and including this message."""
    owner: bytes | None = None
    """Owner of that conversation, for an answer; None: not known."""
    place: bytes = b""
    """Hash that leads to the answer's completion there."""


BEGINNING = Conversation(b"", b"", (), None)
"""Stands for any conversation without an answer: it continues nothing, whatever its messages are."""


class ConversationHasher:
    """Hashes messages, without the text that the patterns match. The operator's patterns run on untrusted text, so the
    search time is bounded.

    Raises:
        regex.error: a pattern is not a valid regular expression.
    """

    def __init__(
        self,
        patterns: Iterable[str] = (),
        timeout_s: float = 0.05,
        most_cached: int = 16_000,
        *,
        keeps_texts: bool = True,
    ) -> None:
        """Create a hasher.

        `timeout_s` bounds the whole search in one conversation, or in one answer; text not searched by then is hashed
        as it is. `most_cached` is how many messages stay cached, and a quarter of it how many answers that no request
        has continued yet. Without `keeps_texts` messages are cached by hash only.
        """
        self._reader = MessageReader(patterns, timeout_s)
        self._short_bytes, self._long_bytes = (SHORT_BYTES, LONG_BYTES) if keeps_texts else (0, 0)
        self._most_cached = most_cached
        self._read_before: dict[bytes, _Message] = {}
        self._given: dict[bytes, tuple[bytes, bytes, bytes, bytes]] = {}
        """By an answer's content hash: `before`, `after`, `owner` and `place` of the message that this answer is in the
        next turn."""
        # Used only where the same message is in several conversations, which overwrite each other's hashes in
        # `_Message`.
        self._link = lru_cache(most_cached)(hash_of)
        self._history_of = lru_cache(most_cached)(history_of)
        self._hash_of = lru_cache(most_cached // 16)(hash_of)

    def conversation(self, messages: Sequence[msgspec.Raw], owner: str | None) -> Conversation:
        """Hash a conversation, message by message. `owner`: its key and end user, if known."""
        self._reader.start_clock()
        known, link, short_bytes = self._read_before, self._link, self._short_bytes
        whole, owned_by = b"", (owner or "").encode()
        long_owner = len(owned_by) > MOST_OWNER_BYTES
        answers: list[bytes] = []
        tool_calls: bytes | None = None
        for raw in messages:
            length = len(raw)
            # Only a hash may be as long as a hash.
            if HASH_BYTES < length <= short_bytes:
                key = b"" + raw  # half of what bytes() takes
            else:
                key = self._hash_of(bytes(raw)) if length <= self._long_bytes else hash_of(raw)
            # Every turn repeats all earlier messages, so most of them are cached.
            message = known.get(key) or self._learn(key, raw)
            if message.before != whole:
                # Most messages belong to one conversation, so this hash is computed once.
                make = hash_of if message.before is None else link
                message.before, message.after, message.owner = whole, make(whole + message.content), None
            before, whole = whole, message.after
            if message.is_answer:
                if long_owner:
                    answers.append(history_of(before, whole, owned_by))
                else:
                    if message.owner != owned_by:
                        make_place = self._history_of if message.place else history_of
                        message.owner, message.place = owned_by, make_place(before, whole, owned_by)
                    answers.append(message.place)
                tool_calls = message.tool_calls
        if not answers:
            return Conversation(owned_by, whole, (), None)
        tool_calls = tool_calls and hash_of(tool_calls + owned_by)
        return Conversation(owned_by, whole, tuple(answers[: -MOST_PLACES - 1 : -1]), tool_calls, messages)

    def history(self, conversation: Conversation, choice: Choice) -> ContinuationKeys:
        """Return the hashes by which a later request finds this answer to `conversation`."""
        if not choice.message:
            return ContinuationKeys()
        self._reader.start_clock()
        message = self._reader.read(
            choice.message if "role" in choice.message else {"role": "assistant", **choice.message}
        )
        before, owner = conversation.whole, conversation.owner
        after = hash_of(before + message.content)
        place = history_of(before, after, owner)
        if message.is_answer and len(owner) <= MOST_OWNER_BYTES:
            self._given[message.content] = before, after, owner, place
            if len(self._given) > self._most_cached // 4:
                evict_oldest(self._given, self._most_cached // 4)
        tool_calls = message.tool_calls and hash_of(message.tool_calls + owner)
        return ContinuationKeys(place, tool_calls)

    def _learn(self, key: bytes, raw: msgspec.Raw) -> _Message:
        read = self._reader.read(msgspec.json.decode(raw))
        message = self._read_before[key] = _Message(read.content, read.is_answer, read.tool_calls)
        if message.is_answer and (given := self._given.pop(message.content, None)) is not None:
            message.before, message.after, message.owner, message.place = given
        if len(self._read_before) > self._most_cached:
            evict_oldest(self._read_before, self._most_cached)
        return message


def prompt_hash(conversation: Conversation, tools: msgspec.Raw, task: str | None) -> str:
    """Return the hash that trajectories share if they begin with the same prompt, tools and task: 32 hex digits."""
    tools_json = b"" if tools == NULL else canonical(tools)
    return hash_of(conversation.whole + (_NO_TASK if task is None else encode_sorted([task])) + tools_json).hex()
