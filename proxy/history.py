"""Conversations as hashes, by which a request finds the completion it goes on from. Pure; knows no trajectory.

Apps do not send an answer back as they got it: keys come in another order, `content: null` becomes "" or goes, ids of
tool calls are made anew, text becomes a list of parts, white space around it is cut off, reasoning is left out. None
of that counts here. What `normalise` (setting `proxy.normalise`) matches does not count either.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import regex

from proxy.call import NULL, Choice, History
from proxy.delta import canonical
from proxy.forgetting import oldest

HASH_BYTES = 16
MOST_PLACES = 32
"""Answers in a conversation, from its end, by which its earlier completion is looked for: an app that went back
further than that begins anew."""
SHORT_BYTES, LONG_BYTES = 512, 4096
"""Messages up to this size are known by themselves, longer ones by a hash of them, which takes longer to make; that of
the latest up to the other size is remembered."""
MOST_OWNER_BYTES = 256
"""Longest name of an owner whose places are remembered."""

THINKING = ("thinking", "redacted_thinking")
MADE_ANEW = frozenset({"id", "status"})
"""Fields of what is no message that a server adds, and an app may leave out."""
_RANDOM_END = re.compile(r"[0-9A-Za-z]{9}$")
"""Of tool-call ids: vLLM makes 32 hex digits, OpenAI and Anthropic 24 letters and digits, Mistral 9."""

log = logging.getLogger(__name__)
_canonical = msgspec.json.Encoder(order="deterministic").encode
_NO_TASK = _canonical([None])


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
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""Copied for each hash, which costs half of making one."""


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
        joined = "|".join(f"(?:{pattern})" for pattern in patterns)
        self._matches = regex.compile(joined) if joined else None
        self._timeout_s = self._left_s = timeout_s
        self._timed_out = False
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
        self._left_s = self._timeout_s
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
        self._left_s = self._timeout_s
        message = self._read(choice.message if "role" in choice.message else {"role": "assistant", **choice.message})
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
        message = self._read_before[key] = self._read(msgspec.json.decode(raw))
        if message.is_answer and (given := self._given.pop(message.said, None)) is not None:
            message.before, message.after, message.owner, message.place = given
        if len(self._read_before) > self._most_kept:
            for forgotten in oldest(self._read_before, self._most_kept):
                del self._read_before[forgotten]
        return message

    def _read(self, message: Any) -> _Message:
        if not isinstance(message, dict):
            return _Message(_hash(_canonical(message)), False, None)
        role, text = message.get("role"), message.get("content")
        if role is None and text is None:
            return _Message(_hash(_canonical(self._item(message))), False, None)
        if not isinstance(text, str):
            text = _text(text)
        if self._matches is not None and isinstance(text, str):
            text = self._without_matches(self._matches, text)
        if role != "assistant":
            return _Message(_hash(_canonical([role, text, message.get("name")])), False, None)
        made = _made(message) if "tool_calls" in message or "function_call" in message else []
        said = [role, text.strip() if isinstance(text, str) else text, [call[1:] for call in made] if made else made]
        return _Message(_hash(_canonical(said)), True, _tool_hash(made) if made else None)

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        """What is no message says in fields of its own: a prompt alone, or a tool's result in another dialect."""
        said = {name: value for name, value in item.items() if value is not None and name not in MADE_ANEW}
        prompt = said.get("prompt")
        if self._matches is not None and isinstance(prompt, str):
            said["prompt"] = self._without_matches(self._matches, prompt)
        return said

    def _without_matches(self, matches: Any, text: str) -> str:
        if self._left_s <= 0:
            return text
        began = time.perf_counter()
        try:
            left: str = matches.sub("", text, timeout=self._left_s)
        except TimeoutError:
            if not self._timed_out:
                log.warning(
                    "proxy.normalise took over %g s on a text of %d characters, which counts as it stands; "
                    "make its patterns simpler (said once)",
                    self._timeout_s,
                    len(text),
                )
            self._timed_out = True
            return text
        finally:
            self._left_s -= time.perf_counter() - began
        return left


def prompt_hash(asked: Conversation, tools: msgspec.Raw, task: str | None) -> str:
    """What trajectories share that begin with the same prompt, tools and task: 32 hex digits."""
    told = b"" if tools == NULL else canonical(tools)
    return _hash(asked.whole + (_NO_TASK if task is None else _canonical([task])) + told).hex()


def _text(content: Any) -> Any:
    """A content's text, if that is all it has; else its parts. Thinking is none of it."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if not (isinstance(part, dict) and part.get("type") in THINKING)]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in ("text", None)]
    told = [text for text in texts if isinstance(text, str)]
    return "".join(told) if len(told) == len(parts) else parts


def _made(message: dict[str, Any]) -> list[list[Any]]:
    """The tool calls of an answer: id, name, arguments."""
    calls = message.get("tool_calls")
    made = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [(call.get("id"), call.get("function")) for call in made]
    if isinstance(old := message.get("function_call"), dict):
        functions.append((None, old))
    return [
        [call_id, function.get("name"), _arguments(function.get("arguments"))]
        for call_id, function in functions
        if isinstance(function, dict)
    ]


def _arguments(text: Any) -> Any:
    """A call's arguments: what the JSON says, however it is written."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _tool_hash(made: list[list[Any]]) -> bytes | None:
    """None where an id is no random one: `functions.search:0` is everybody's."""
    if not all(isinstance(call[0], str) and _RANDOM_END.search(call[0]) for call in made):
        return None
    return _hash(b"tool calls" + _canonical(made))


def _hash(data: bytes | msgspec.Raw) -> bytes:
    made = _EMPTY.copy()
    made.update(data)
    return made.digest()
