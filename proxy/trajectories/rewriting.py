"""Recognise a served answer that an app rewrote before it sent it back. Pure.

An app that renders answers itself (tool calls as text, in another API's form, without the reasoning) repeats at least
one of these, and none of them stands in a prompt that was written without reading the answer:

1. an id that a server made for this answer, for an item in it or for a tool call in it;
2. its tool calls, by name and arguments;
3. its text, compared without letter case, punctuation, white space, tags, escapes and reasoning in tags.

Texts and calls shorter than LEAST_CHARACTERS count only if nothing was rewritten: the example answers of a few-shot
prompt may contain the same few words.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from whetstone.domain.conversation_hash import THINKING, calls_of, canonical, has_random_end, hash_of, is_answer

MOST_CHARACTERS = 400
"""Characters of an answer's text that are compared: the last ones, since reasoning stands first."""
LEAST_CHARACTERS = 24
"""Fewest characters, without what is not compared, that identify an answer."""
MOST_CALLS_BYTES, MOST_IDS = 1000, 16
"""Longest JSON of an answer's tool calls that stays in memory, a hash instead of a longer one; and most of its ids."""
MOST_ECHO_CHARACTERS = 20_000
"""Characters of a request's text in which an answer is searched."""
MOST_BYTES = 100_000
"""Bytes of a request, from the answer on, in which an answer's ids are searched."""

_NOT_COMPARED = re.compile(r"(?:\\[nrt]|</?[A-Za-z][\w-]{0,40}/?>|[\W_])+")
_END_OF_REASONING = "</think>"
HASHED = b"#"
_DIGIT = re.compile(r"\d.{0,8}$")

_decode = msgspec.json.Decoder().decode


class Evidence(IntEnum):
    """How surely an answer is the one that a request repeats."""

    NONE = 0
    PART = 1
    """The request repeats its text or its tool calls among other text."""
    WHOLE = 2
    """The request repeats its text or its tool calls, and nothing else."""
    ID = 3
    """The request repeats an id of this answer."""


class AnswerMarks(msgspec.Struct, frozen=True, gc=False):
    """What identifies an answer, however an app rewrites it."""

    text: str = ""
    """The end of its text."""
    calls: bytes = b""
    """Its tool calls as JSON, name and arguments; a hash after HASHED if that is long."""
    ids: tuple[str, ...] = ()
    """Ids that a server made for what is in it."""


class Echo(msgspec.Struct, frozen=True):
    """What a request says from an earlier answer on."""

    data: bytes
    """The JSON of all these messages."""
    text: str
    """The text of the answer, which are the messages up to the first one that no model wrote."""
    words: str
    """The same as it is compared."""
    calls: bytes
    """Its tool calls, as in `AnswerMarks`."""


def marks_of(message: dict[str, Any]) -> AnswerMarks:
    """Return what identifies this answer."""
    content = message.get("content")
    # Most answers are a text.
    if type(content) is str and "tool_calls" not in message and "function_call" not in message:
        return AnswerMarks(content[-MOST_CHARACTERS:])
    text, calls, ids = _content([message])
    return AnswerMarks(text[-MOST_CHARACTERS:], calls, tuple(ids))


def echo_since(messages: Sequence[msgspec.Raw], place: int) -> Echo:
    """Return what a request's messages say from one of its answers on; `place` 0 is its last answer."""
    left, start = place, len(messages)
    while start > 0 and left >= 0:
        start -= 1
        left -= is_answer(_decode(messages[start]))
    answer = []
    for raw in messages[start:]:
        message = _decode(raw)
        if not is_answer(message):
            break
        answer.append(message)
    text, calls, _ = _content(answer)
    text = text[:MOST_ECHO_CHARACTERS]
    return Echo(b"\n".join(messages[start:])[:MOST_BYTES], text, words_of(text), calls)


def evidence(answer: AnswerMarks | str, completion_id: str | None, echo: Echo) -> Evidence:
    """Compare an answer, by its marks or by its text alone, with what a request repeats. `completion_id`: as the app
    may have it, unless other answers share it."""
    marks = AnswerMarks(answer) if isinstance(answer, str) else answer
    if completion_id is not None and completion_id.encode() in echo.data:
        return Evidence.ID
    if any(one.encode() in echo.data for one in marks.ids):
        return Evidence.ID
    if marks.calls and marks.calls == echo.calls:
        return Evidence.WHOLE
    if echo.calls:
        return Evidence.NONE
    if marks.calls and _calls_within(marks.calls, echo.words):
        return Evidence.PART
    if not marks.calls and marks.text and marks.text.strip() == echo.text:
        return Evidence.WHOLE
    words = words_of(marks.text)
    if len(words) < LEAST_CHARACTERS:
        return Evidence.NONE
    return Evidence.WHOLE if words == echo.words else Evidence.PART if words in echo.words else Evidence.NONE


def words_of(text: str) -> str:
    """Return a text as it is compared: words in small letters."""
    return _NOT_COMPARED.sub(" ", text.rpartition(_END_OF_REASONING)[2]).strip().casefold()


def _calls_within(calls: bytes, words: str) -> bool:
    """Return whether a text names all these calls and their arguments."""
    if calls.startswith(HASHED):
        return False
    parts = [words_of(part) for part in _leaves(_decode(calls))]
    return sum(map(len, parts)) >= LEAST_CHARACTERS and all(part in words for part in parts)


def _leaves(value: Any) -> list[str]:
    """Return all texts and numbers in a JSON value as texts, in no order."""
    leaves, left = [], [value]
    while left:
        part = left.pop()
        if isinstance(part, dict | list):
            left += part.values() if isinstance(part, dict) else part
        elif part is not None:
            leaves.append(part if isinstance(part, str) else str(part))
    return leaves


def _content(messages: Iterable[Any]) -> tuple[str, bytes, list[str]]:
    """Return text, tool calls and ids of an answer that consists of these messages, or items of a response."""
    texts: list[str] = []
    calls: list[list[Any]] = []
    ids: list[Any] = []
    for message in messages:
        its_calls = calls_of(message)
        calls += its_calls
        ids += [message.get("id"), *(call[0] for call in its_calls)]
        _read_parts(message, texts, ids)
    made = canonical([call[1:] for call in calls]) if calls else b""
    if len(made) > MOST_CALLS_BYTES:
        made = HASHED + hash_of(made)
    return "\n".join(texts).strip(), made, [one for one in ids if has_random_end(one) and _DIGIT.search(one)][:MOST_IDS]


def _read_parts(message: dict[str, Any], texts: list[str], ids: list[Any], depth: int = 2) -> None:
    """Add the texts and the ids of a message's parts. A response that was passed on is a message of items, which have
    parts (`depth` 2)."""
    content = message.get("content")
    if message.get("type") in ("reasoning", *THINKING):
        return
    if isinstance(content, str):
        texts.append(content)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict):
            ids.append(part.get("id"))
            if isinstance(part.get("text"), str) and part.get("type") not in THINKING:
                texts.append(part["text"])
            if depth > 1:
                _read_parts(part, texts, ids, depth - 1)
