"""Hash conversations by their content: the one definition, for served calls and for imported logs.

Apps do not send an answer back byte for byte: keys come in another order, `content: null` becomes "" or is dropped,
tool-call ids are regenerated, text becomes a list of parts, surrounding white space is stripped, reasoning is left out.
The hashes ignore all of these differences, and everything that `normalise` (setting `proxy.normalise`) matches. The
databases store these hashes: a change of the definition breaks every conversation that is in progress.
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
PROMPT_BYTES, HISTORY_BYTES = 8, 20
"""Bytes of the hash by which an answer's completion is looked up, the latter, and how many of them its prompt alone
decides: those of all answers to one prompt begin alike, so one index finds both.
"""
MOST_PLACES = 32
"""Most answers, counted from the end of a conversation, by which its earlier completion is looked up. An app that goes
back further begins a new trajectory."""
THINKING = ("thinking", "redacted_thinking")
ADDED_BY_SERVERS = frozenset({"id", "status"})
"""Fields of items other than messages that a server adds and an app may leave out."""
_RANDOM_END = re.compile(r"[0-9A-Za-z]{9}$")
"""The random end of a tool-call id: vLLM makes 32 hex digits, OpenAI and Anthropic 24 letters and digits, Mistral 9."""
_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""Copied for each hash; creating a new hash object takes half of the time of a hash."""

log = logging.getLogger(__name__)
canonical = msgspec.json.Encoder(order="deterministic").encode


class MessageHash(msgspec.Struct, frozen=True, gc=False):
    """The hashes of one message, independent of its position."""

    content: bytes
    """Hash of its content."""
    is_answer: bool
    tool_calls: bytes | None
    """Hash of the tool calls in it, ids included."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """The hashes of one message at its position in a conversation."""

    whole: bytes
    """Hash of all messages up to and including this one, without the end user."""
    history: bytes | None
    """Key by which the completion that this message is can be looked up; None if it is not an answer."""
    tool_history: bytes | None
    """The same by its tool calls; None if it has none."""


class MessageReader:
    """Hashes messages without the text that the patterns match.

    The patterns are the operator's and run on untrusted text, so their time is bounded.

    Raises:
        regex.error: a pattern is not a valid regular expression.
    """

    def __init__(self, patterns: Iterable[str] = (), timeout_s: float = 0.05) -> None:
        """`timeout_s`: for all searches between two calls of `start_clock`; text that is not searched by then is hashed
        unchanged."""
        joined = "|".join(f"(?:{pattern})" for pattern in patterns)
        self._matches = regex.compile(joined) if joined else None
        self._timeout_s = self._left_s = timeout_s
        self._timed_out = False

    def start_clock(self) -> None:
        """Reset the time limit for another conversation or another answer."""
        self._left_s = self._timeout_s

    def turns(self, messages: Iterable[Any], owner: str | None) -> list[Turn]:
        """Hash a whole conversation. `owner`: the app's end user; the histories of other owners never match."""
        self.start_clock()
        whole, owned_by, turns = b"", (owner or "").encode(), []
        for message in messages:
            read = self.read(message)
            before, whole = whole, hash_of(whole + read.content)
            history = history_of(before, whole, owned_by) if read.is_answer else None
            turns.append(Turn(whole, history, read.tool_calls and hash_of(read.tool_calls + owned_by)))
        return turns

    def read(self, message: Any) -> MessageHash:
        """Hash one message."""
        if not isinstance(message, dict):
            return MessageHash(hash_of(canonical(message)), False, None)
        role, text = message.get("role"), message.get("content")
        if role is None and text is None:
            made = _made_in_parts([message])
            hashed = hash_of(canonical(self._item(message)))
            return MessageHash(hashed, _is_item_of_answer(message), _tool_hash(made) if made else None)
        if not isinstance(text, str):
            text = _text(text)
        if self._matches is not None and isinstance(text, str):
            text = self._without_matches(self._matches, text)
        if role != "assistant":
            hashed = hash_of(canonical([role, text, message.get("name")]))
            return MessageHash(hashed, role is None and _is_item_of_answer(message), None)
        made = _made(message) if "tool_calls" in message or "function_call" in message else []
        answer = [role, text.strip() if isinstance(text, str) else text, [call[1:] for call in made] if made else made]
        if isinstance(text, list):
            made = made or _made_in_parts(text)
            # In the next request each item of a response is a message of its own, so the last call comes last.
            made = made[-1:] if any(_is_item_of_answer(part) for part in text) else made
        return MessageHash(hash_of(canonical(answer)), True, _tool_hash(made) if made else None)

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the content of an item that is not a message: a bare prompt, or a tool result in another API
        format."""
        content = {name: value for name, value in item.items() if value is not None and name not in ADDED_BY_SERVERS}
        prompt = content.get("prompt")
        if self._matches is not None and isinstance(prompt, str):
            content["prompt"] = self._without_matches(self._matches, prompt)
        return content

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
                    "make its patterns simpler (logged once)",
                    self._timeout_s,
                    len(text),
                )
            self._timed_out = True
            return text
        finally:
            self._left_s -= time.perf_counter() - began
        return left


def lookup_keys(turns: Sequence[Turn]) -> list[bytes]:
    """Return all keys by which the earlier completion of a request can be looked up, the most reliable first: the tool
    calls of its last answer, then its prefixes that end with an answer, the longest first."""
    answers = [turn for turn in turns if turn.history is not None][: -MOST_PLACES - 1 : -1]
    tool_calls = [turn.tool_history for turn in answers[:1] if turn.tool_history is not None]
    return [*tool_calls, *(turn.history for turn in answers if turn.history is not None)]


def is_answer(message: Any) -> bool:
    """Return whether a message, or an item of a Responses input, is what a model answered or a part of an answer."""
    if not isinstance(message, dict):
        return False
    role = message.get("role")
    return role == "assistant" or (role is None and _is_item_of_answer(message))


def calls_of(message: dict[str, Any]) -> list[list[Any]]:
    """Return the tool calls of an answer, whichever API it comes from: id, name, arguments."""
    content = message.get("content")
    return _made(message) + _made_in_parts(content if isinstance(content, list) else [message])


def has_random_end(call_id: Any) -> bool:
    """Return whether an id ends as ids that servers make do, so that no other answer has the same."""
    return isinstance(call_id, str) and _RANDOM_END.search(call_id) is not None


def hash_of(data: bytes | msgspec.Raw) -> bytes:
    """Return 16 bytes of BLAKE2b."""
    made = _EMPTY.copy()
    made.update(data)
    return made.digest()


def history_of(before: bytes, after: bytes, owner: bytes) -> bytes:
    """Return the HISTORY_BYTES by which an answer's completion is looked up. `before` and `after`: hashes of the
    conversation without and with the answer. Another owner gets other bytes."""
    return hash_of(before + owner)[:PROMPT_BYTES] + hash_of(after + owner)[: HISTORY_BYTES - PROMPT_BYTES]


def prompt_of(history: bytes) -> bytes:
    """Return the part of a history that all answers to its prompt share."""
    return history[:PROMPT_BYTES]


def _text(content: Any) -> Any:
    """Return the text of a content that consists of text only, else its parts. Thinking parts are skipped."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if not (isinstance(part, dict) and part.get("type") in THINKING)]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") in ("text", None) and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(parts) else parts


def _made(message: dict[str, Any]) -> list[list[Any]]:
    """Return the tool calls of an answer: id, name, arguments."""
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


def _made_in_parts(parts: Iterable[Any]) -> list[list[Any]]:
    """Return the tool calls among the parts of an Anthropic message or the items of a response, as `_made` does."""
    made = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            # The recorded arguments of a stream that was passed on are text.
            made.append([part.get("id"), part.get("name"), _arguments(part.get("partial_json") or part.get("input"))])
        elif _is_item_of_answer(part) and part.get("call_id") is not None:
            made.append([part["call_id"], part.get("name"), _arguments(part.get("arguments", part.get("input")))])
    return made


def _is_item_of_answer(item: Any) -> bool:
    """Return whether an item of a Responses input is reasoning or a tool call of an earlier answer."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind == "reasoning" or (isinstance(kind, str) and kind.endswith("_call"))


def _arguments(text: Any) -> Any:
    """Return a call's arguments as parsed JSON, independent of their formatting."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _tool_hash(made: list[list[Any]]) -> bytes | None:
    """Return the hash of tool calls; None if an id is not random: `functions.search:0` occurs in every conversation."""
    if not all(has_random_end(call[0]) for call in made):
        return None
    return hash_of(b"tool calls" + canonical(made))
