"""Conversations as hashes of what they say: the one definition, for served calls and for imported logs.

Apps do not send an answer back as they got it: keys come in another order, `content: null` becomes "" or goes, ids of
tool calls are made anew, text becomes a list of parts, white space around it is cut off, reasoning is left out. None
of that counts here. What `normalise` (setting `proxy.normalise`) matches does not count either. The databases have
these hashes: to change what they are made of is to lose every conversation that is under way. Pure; knows no table.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import regex

HASH_BYTES = 16
MOST_PLACES = 32
"""Answers in a conversation, from its end, by which its earlier completion is looked for: an app that went back
further than that begins anew."""
THINKING = ("thinking", "redacted_thinking")
MADE_ANEW = frozenset({"id", "status"})
"""Fields of what is no message that a server adds, and an app may leave out."""
_RANDOM_END = re.compile(r"[0-9A-Za-z]{9}$")
"""Of tool-call ids: vLLM makes 32 hex digits, OpenAI and Anthropic 24 letters and digits, Mistral 9."""
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""Copied for each hash, which costs half of making one."""

log = logging.getLogger(__name__)
canonical = msgspec.json.Encoder(order="deterministic").encode


class MessageHash(msgspec.Struct, frozen=True, gc=False):
    """One message, wherever it stands."""

    said: bytes
    """Hash of what it says."""
    is_answer: bool
    tool_calls: bytes | None
    """Hash of the tool calls in it, ids included."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One message in its conversation."""

    whole: bytes
    """Hash of all messages up to and with it, whoever asks."""
    history: bytes | None
    """What the completion that it is may be found by; None where it is no answer."""
    tool_history: bytes | None
    """The same, by its tool calls; None: it made none."""


class MessageReader:
    """Reads messages, without what the patterns match: the operator's, on texts of strangers, so for a bounded time.

    Raises:
        regex.error: a pattern is no regular expression.
    """

    def __init__(self, patterns: Iterable[str] = (), timeout_s: float = 0.05) -> None:
        """`timeout_s`: for all that is searched between two calls of `start_clock`; what is not done by then is taken
        as it stands."""
        joined = "|".join(f"(?:{pattern})" for pattern in patterns)
        self._matches = regex.compile(joined) if joined else None
        self._timeout_s = self._left_s = timeout_s
        self._timed_out = False

    @property
    def has_patterns(self) -> bool:
        """Whether anything is left out of texts."""
        return self._matches is not None

    def start_clock(self) -> None:
        """Begin another conversation, or another answer."""
        self._left_s = self._timeout_s

    def turns(self, messages: Iterable[Any], owner: str | None) -> list[Turn]:
        """Hash a whole conversation. `owner`: whom the app serves; nobody else finds the same answers."""
        self.start_clock()
        whole, owned_by, turns = b"", (owner or "").encode(), []
        for message in messages:
            read = self.read(message)
            whole = hash_of(whole + read.said)
            history = hash_of(whole + owned_by) if read.is_answer else None
            turns.append(Turn(whole, history, read.tool_calls and hash_of(read.tool_calls + owned_by)))
        return turns

    def read(self, message: Any) -> MessageHash:
        """Hash one message."""
        if not isinstance(message, dict):
            return MessageHash(hash_of(canonical(message)), False, None)
        role, text = message.get("role"), message.get("content")
        if role is None and text is None:
            return MessageHash(hash_of(canonical(self._item(message))), False, None)
        if not isinstance(text, str):
            text = _text(text)
        if self._matches is not None and isinstance(text, str):
            text = self._without_matches(self._matches, text)
        if role != "assistant":
            return MessageHash(hash_of(canonical([role, text, message.get("name")])), False, None)
        made = _made(message) if "tool_calls" in message or "function_call" in message else []
        said = [role, text.strip() if isinstance(text, str) else text, [call[1:] for call in made] if made else made]
        return MessageHash(hash_of(canonical(said)), True, _tool_hash(made) if made else None)

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


def found_by(turns: Sequence[Turn]) -> list[bytes]:
    """All that the earlier completion of a request may be found by, the surest first: the tool calls of its last
    answer, then its beginnings that end with an answer, the longest first."""
    answers = [turn for turn in turns if turn.history is not None][: -MOST_PLACES - 1 : -1]
    tool_calls = [turn.tool_history for turn in answers[:1] if turn.tool_history is not None]
    return [*tool_calls, *(turn.history for turn in answers if turn.history is not None)]


def hash_of(data: bytes | msgspec.Raw) -> bytes:
    """16 bytes of BLAKE2b."""
    made = _EMPTY.copy()
    made.update(data)
    return made.digest()


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
    return hash_of(b"tool calls" + canonical(made))
