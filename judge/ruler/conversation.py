"""Convert an attempt into the form that a judge reads: one line of JSON for each message. Pure.

Attempts that did the same give the same lines, so that their common beginning is shown once. Accidental differences are
removed: ids of tool calls, ids of messages, empty fields, a text in a list of one part. A judge reads text only:
images, files and sound become a short placeholder. Nothing else does: anything that could be text is shown, under any
field name.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from judge.decisions.model import Turn

DIGEST_BYTES = 16
NOTE = "note"
"""Key of the lines that we add; no message has it at its top level."""
ANSWER_NUMBER = "answer_number"
"""Key of the number of an answer, from 1, where answers are scored one by one; neither has a message this one."""

_NEW_PROMPT = "the app began a new prompt"
_TOO_DEEP = "what stood here is nested too deeply to be shown"
_CALL_IDS = frozenset({"tool_call_id", "tool_use_id", "call_id"})
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
"""Types of content whose `id` is a tool call's."""
_UNREADABLE = {"signature": "thinking", "encrypted_content": "reasoning"}
"""Fields that only a provider can read, and the type they belong to. In other types they may be an app's own."""
_TEXTS = frozenset({"text", "input_text", "output_text"})
_ID = re.compile(r"[!-~]*")
"""A value with a space is a text, not an id."""
_LEAST_BASE64 = 200
"""A shorter string costs little to show, and may be a path, a hash or a word."""
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]+|[A-Za-z0-9_-]+)={0,2}")
_DIGIT = re.compile(r"[0-9]")
_DATA_URL = re.compile(
    r"data:([\w.+-]{1,40}/[\w.+-]{1,80})?(?:;[\w.-]{1,40}=[\w.-]{1,80}){0,4};base64,"
    rf"([A-Za-z0-9+/_%-]{{{_LEAST_BASE64},}}={{0,2}})",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One attempt."""

    trajectory_id: str
    tools: str | None
    """The last tools that were sent, as canonical JSON."""
    lines: tuple[str, ...]
    """One JSON object for each message, role first; `{"note": …}` is ours. No line breaks."""
    digest: bytes
    """blake2b of tools and lines, 16 bytes: equal for attempts that look the same to a judge."""
    answers: int = 0
    """How many answers have a number."""


def conversation(trajectory_id: str, turns: Sequence[Turn], *, by_turn: bool = False) -> Conversation:
    """Return the turns as one conversation. `by_turn`: number its answers.

    A turn that does not extend the previous one begins with a note. Those of its messages that already stand at the
    start of the conversation are left out. Tool calls are numbered `call-1`, `call-2`, … in each prompt.
    """
    lines: list[str] = []
    tools = None
    answers = 0
    reader = _Reader()
    for turn in turns:
        restarts = bool(lines) and not turn.extends
        if restarts:
            reader = _Reader()
        added = [reader.line(message) for message in turn.messages]
        if restarts:
            added = [to_json({NOTE: _NEW_PROMPT}), *added[_equal(lines, added) :]]
        lines += added
        if turn.response is not None or turn.response_text is not None:
            answers += 1
            lines.append(reader.line(_answer(turn), answers if by_turn else None))
        tools = tools if turn.tools is None else turn.tools
    tools_line = _line(_plain, tools) if tools else None
    looks = "\n".join([tools_line or "", *lines]).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(looks, digest_size=DIGEST_BYTES).digest()
    return Conversation(trajectory_id, tools_line, tuple(lines), digest, answers if by_turn else 0)


def shared(conversations: Sequence[Conversation]) -> int:
    """Return the number of leading lines that all have: never all lines of one, since its last line is judged."""
    most = max(min((len(one.lines) for one in conversations), default=0) - 1, 0)
    return min((_equal(conversations[0].lines[:most], one.lines) for one in conversations), default=0)


class _Reader:
    """Converts one prompt's messages into lines."""

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}

    def line(self, message: Any, number: int | None = None) -> str:
        line = _line(self._message, message)
        # Before the message's own fields, so that it is not cut off with a long text.
        return line if number is None else f'{{"{ANSWER_NUMBER}":{number},{line[1:]}'

    def _message(self, message: Any) -> dict[str, Any]:
        # A message that contains a field name of ours must not look like a line of ours.
        if not isinstance(message, dict) or NOTE in message or ANSWER_NUMBER in message:
            return {"message": _plain(message)}
        fields = {key: value for key, value in message.items() if key != "id" or not _is_id(value)}
        if not fields.get("content", True):
            fields["content"] = None if fields.get("tool_calls") else ""
        shortened = self._object(fields, is_call=False)
        prompt = shortened.get("prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            shortened["prompt"] = f"[{len(prompt)} token ids]"
        return {**({"role": shortened.pop("role")} if "role" in shortened else {}), **shortened}

    def _object(self, value: dict[str, Any], is_call: bool) -> dict[str, Any]:
        """Convert a message, a part of its content or a tool call, without empty fields."""
        shortened = {}
        for key in sorted(value):
            field = value[key]
            if field is None or field == [] or _is_unreadable(key, field, value.get("type")):
                continue
            if key in _CALL_IDS or (is_call and key == "id"):
                shortened[key] = self._call(field)
            elif key in ("content", "tool_calls") and isinstance(field, list):
                shortened[key] = self._parts(field, is_calls=key == "tool_calls")
            else:
                shortened[key] = _shallow(field)
        return _without_bytes(shortened)

    def _parts(self, parts: list[Any], is_calls: bool) -> Any:
        shortened = [
            self._object(one, is_call=is_calls or one.get("type") in _CALLS) if isinstance(one, dict) else _shallow(one)
            for one in parts
        ]
        only = shortened[0] if len(shortened) == 1 else None
        if isinstance(only, dict) and only.keys() == {"type", "text"} and only["type"] in _TEXTS:
            return only["text"]
        return shortened

    def _call(self, given: Any) -> Any:
        """Return the id that replaces this one."""
        if not isinstance(given, str) or not _is_id(given):
            return _shallow(given)
        return self._calls.setdefault(given, f"call-{len(self._calls) + 1}")


def _line(reading: Callable[[Any], Any], value: Any) -> str:
    """Return the result of `reading` as JSON. An app may nest values deeper than Python's stack allows."""
    try:
        return to_json(reading(value))
    except RecursionError:
        return to_json({NOTE: _TOO_DEEP})


def _answer(turn: Turn) -> dict[str, Any]:
    if isinstance(turn.response, dict):
        return {**turn.response, "role": "assistant"}
    return {"role": "assistant", "content": turn.response_text if turn.response is None else turn.response}


def _shallow(value: Any) -> Any:
    """Convert a value; one that is nested too deeply is replaced by a remark, and no other field is lost."""
    try:
        return _plain(value)
    except RecursionError:
        return _TOO_DEEP


def _plain(value: Any) -> Any:
    """Return the value with its keys in order, and without bytes that a judge cannot read."""
    # No `match`: an attempt may have a hundred thousand values, and this is most of their cost.
    if isinstance(value, str):
        return value if len(value) < _LEAST_BASE64 else _DATA_URL.sub(_placeholder, value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return _without_bytes({key: _plain(value[key]) for key in sorted(value)})
    return value


def _without_bytes(value: dict[str, Any]) -> dict[str, Any]:
    """Replace base64 in Anthropic's `{"media_type": …, "data": …}` and OpenAI's `{"format": …, "data": …}`."""
    if "data" not in value:
        return value
    data, kind = value["data"], value.get("media_type", value.get("format"))
    if not isinstance(data, str) or not isinstance(kind, str) or value.get("type") == "text" or not _is_base64(data):
        return value
    return value | {"data": _named(kind, data)}


def _placeholder(match: re.Match[str]) -> str:
    return _named(match[1] or "data", match[2]) if _is_base64(unquote(match[2])) else match[0]


def _is_base64(text: str) -> bool:
    """Return whether this is bytes, not words: long, in one base64 alphabet, with both cases and digits."""
    is_encoded = len(text) >= _LEAST_BASE64 and _BASE64.fullmatch(text) is not None
    return is_encoded and text.lower() != text != text.upper() and _DIGIT.search(text) is not None


def _is_unreadable(key: str, field: Any, kind: Any) -> bool:
    is_base64 = isinstance(field, str) and key in _UNREADABLE and _BASE64.fullmatch(field) is not None
    return is_base64 and (kind == _UNREADABLE[key] or _is_base64(field))


def _is_id(value: Any) -> bool:
    return not isinstance(value, str | list | dict) or (isinstance(value, str) and _ID.fullmatch(value) is not None)


def _named(kind: str, data: str) -> str:
    """Return the placeholder of base64 data: its kind, its size, and six hex digits that are equal for equal data."""
    same = hashlib.blake2b(data.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"[{kind[:40]}, {len(data.rstrip('=')) * 3 // 4} bytes, {same}]"


def _equal(some: Sequence[str], others: Sequence[str]) -> int:
    """Return the number of equal leading lines."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(some), len(others)))


def to_json(value: Any) -> str:
    """Return the value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
