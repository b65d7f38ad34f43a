"""Conversations as hashes, by which a request finds the completion it goes on from. Pure; knows no trajectory.

`whetstone.conversations` defines the hashes. Here they are made fast: a message that was read before is known.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from proxy.call import NULL, Choice, History
from proxy.delta import canonical
from proxy.forgetting import oldest
from whetstone.conversations import HASH_BYTES, MOST_PLACES, MessageReader
from whetstone.conversations import canonical as told_canonically
from whetstone.conversations import hash_of as _hash

SHORT_BYTES, LONG_BYTES = 512, 4096
"""Messages up to this size are known by themselves, longer ones by a hash of them, which takes longer to make; that of
the latest up to the other size is remembered."""
MOST_OWNER_BYTES = 256
"""Longest name of an owner whose places are remembered."""

_NO_TASK = told_canonically([None])


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """A request's conversation. `answers` and `tool_calls` are its owner's: nobody else finds the same."""

    owner: bytes
    whole: bytes
    """Hash of all its messages, whoever asks."""
    answers: tuple[bytes, ...]
    """Hashes of its beginnings that end with an answer, the longest first."""
    tool_calls: bytes | None
    """Hash of the tool calls that its last answer made, ids included; None: it made none."""

    @property
    def found_by(self) -> tuple[bytes, ...]:
        """All that its earlier completion may be found by, the surest first."""
        return self.answers if self.tool_calls is None else (self.tool_calls, *self.answers)


class _Message(msgspec.Struct, gc=False):
    """What a message comes to."""

    said: bytes
    """Hash of what it says."""
    is_answer: bool
    tool_calls: bytes | None
    """Hash of the tool calls in it, ids included."""
    before: bytes | None = None
    """Hash of the conversation before it, where it was seen last: nearly always the one where it is seen again."""
    after: bytes = b""
    """The same with it."""
    owner: bytes | None = None
    """Whose conversation that was, of an answer; None: it is not known."""
    place: bytes = b""
    """What its completion is found by there."""


NOTHING = _Message(b"", False, None)
BEGINNING = Conversation(b"", b"", (), None)
"""Stands for any in which nobody has answered yet: it goes on from nothing, whatever it says."""


class Normaliser:
    """Reads messages, without what the patterns match: the operator's, on texts of strangers, so for a bounded time.

    Raises:
        regex.error: one is no regular expression.
    """

    def __init__(
        self,
        patterns: Iterable[str] = (),
        timeout_s: float = 0.05,
        most_kept: int = 16_000,
        *,
        keeps_texts: bool = True,
    ) -> None:
        """`timeout_s`: for all that is searched in one conversation, or one answer; what is not done by then is taken
        as it stands. `most_kept`: messages that are known, and a quarter of it answers that nobody went on from yet;
        without `keeps_texts` by hashes alone."""
        self._reader = MessageReader(patterns, timeout_s)
        self._short_bytes, self._long_bytes = (SHORT_BYTES, LONG_BYTES) if keeps_texts else (0, 0)
        self._most_kept = most_kept
        self._read_before: dict[bytes, _Message] = {}
        self._given: dict[bytes, tuple[bytes, bytes, bytes, bytes]] = {}
        """By what an answer says: `before`, `after`, `owner` and `place` of the message that it is in its next turn."""
        # Only where the same is said in several places, which take each other's in `_Message`.
        self._link = lru_cache(most_kept)(_hash)
        self._hash_of = lru_cache(most_kept // 16)(_hash)

    def conversation(self, messages: Sequence[msgspec.Raw], owner: str | None) -> Conversation:
        """Hash a conversation, message by message. `owner`: whom the app serves, if it says so."""
        self._reader.start_clock()
        known, link, short_bytes = self._read_before, self._link, self._short_bytes
        whole, owned_by = b"", (owner or "").encode()
        long_owner = len(owned_by) > MOST_OWNER_BYTES
        answers: list[bytes] = []
        last = NOTHING
        for raw in messages:
            length = len(raw)
            # As long as a hash is only what is one.
            if HASH_BYTES < length <= short_bytes:
                key = b"" + raw  # half of what bytes() takes
            else:
                key = self._hash_of(bytes(raw)) if length <= self._long_bytes else _hash(raw)
            # One that was read before need not be read again: every turn brings all that was said so far.
            message = known.get(key) or self._learn(key, raw)
            if message.before != whole:
                # Most messages are of one conversation, and this is made once.
                make = _hash if message.before is None else link
                message.before, message.after, message.owner = whole, make(whole + message.said), None
            whole = message.after
            if message.is_answer:
                if message.owner != owned_by and not long_owner:
                    make = link if message.place else _hash
                    message.owner, message.place = owned_by, make(whole + owned_by)
                answers.append(whole if long_owner else message.place)
                last = message
        if not answers:
            return Conversation(owned_by, whole, (), None)
        places = answers[: -MOST_PLACES - 1 : -1]
        if long_owner:
            places = [_hash(one + owned_by) for one in places]
        return Conversation(owned_by, whole, tuple(places), last.tool_calls and _hash(last.tool_calls + owned_by))

    def history(self, asked: Conversation, choice: Choice) -> History:
        """What this answer to that conversation leaves."""
        if not choice.message:
            return History()
        self._reader.start_clock()
        message = self._reader.read(
            choice.message if "role" in choice.message else {"role": "assistant", **choice.message}
        )
        before, owner = asked.whole, asked.owner
        after = _hash(before + message.said)
        place = _hash(after + owner)
        if message.is_answer and len(owner) <= MOST_OWNER_BYTES:
            self._given[message.said] = before, after, owner, place
            if len(self._given) > self._most_kept // 4:
                for forgotten in oldest(self._given, self._most_kept // 4):
                    del self._given[forgotten]
        return History(place, message.tool_calls and _hash(message.tool_calls + owner))

    def _learn(self, key: bytes, raw: msgspec.Raw) -> _Message:
        read = self._reader.read(msgspec.json.decode(raw))
        message = self._read_before[key] = _Message(read.said, read.is_answer, read.tool_calls)
        if message.is_answer and (given := self._given.pop(message.said, None)) is not None:
            message.before, message.after, message.owner, message.place = given
        if len(self._read_before) > self._most_kept:
            for forgotten in oldest(self._read_before, self._most_kept):
                del self._read_before[forgotten]
        return message


def prompt_hash(asked: Conversation, tools: msgspec.Raw, task: str | None) -> str:
    """What trajectories share that begin with the same prompt, tools and task: 32 hex digits."""
    told = b"" if tools == NULL else canonical(tools)
    return _hash(asked.whole + (_NO_TASK if task is None else told_canonically([task])) + told).hex()
