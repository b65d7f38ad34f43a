"""Shape a trajectory's messages for people: role, text, tools. Pure.

Apps use four dialects and send anything: unknown parts are shown as JSON, never left out. Media are named, not shown: a
page must not fetch an address that an app has sent.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "thinking", "call", "result", "media", "json"]

MOST_CHARACTERS = 6_000
"""Most characters of one part; the rest is counted. A page stays small whatever an app sends; the turn's own page shows
more."""
EXCERPT_MESSAGES = 8
"""Most messages of an excerpt: the first one, and the rest from its end."""
EXCERPT_CHARACTERS = 3_000
MOST_PARTS = 100
"""Most parts of one message."""
MOST_NAME = 40
"""Most characters of a role or a name: apps may send anything."""
REDACTED = re.compile(r"(\[(?:redaction timed out|redaction failed|[a-z0-9][a-z0-9_-]{0,40})\])")
"""The mark that redaction leaves in place of removed text (docs/privacy.md)."""

_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "refusal"})
_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "sound",
    "input_audio": "sound",
    "audio_url": "sound",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
}
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use", "function_call", "custom_tool_call"})
_RESULTS = frozenset({"tool_result", "function_call_output", "custom_tool_call_output", "mcp_tool_result"})
_ROLES = {"developer": "system", "function": "tool", "model": "assistant"}

_PRETTY = json.JSONEncoder(ensure_ascii=False, indent=2)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a message."""

    kind: Kind
    text: str
    name: str = ""
    """Name of a tool, or kind of media."""
    cut: int = 0
    """Characters after `text` that are not shown."""

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """Return the text in pieces, each with whether it is a redaction mark."""
        return marked(self.text)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    parts: tuple[Part, ...]
    name: str = ""


def messages_of(values: Any, most_characters: int = MOST_CHARACTERS) -> list[Message]:
    """Return the messages of a request, or the one of an answer, in any dialect."""
    several = values if isinstance(values, list) else [] if values is None else [values]
    return [_message(value, most_characters) for value in several]


def excerpt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the beginning and the end of a conversation: its `messages`, how many are `left_out`, and the `answer`.
    `row`: `messages` and `response` as they are stored."""
    messages = messages_of(row["messages"], EXCERPT_CHARACTERS)
    left_out = max(0, len(messages) - EXCERPT_MESSAGES)
    return {
        "messages": [*messages[:1], *messages[1 - EXCERPT_MESSAGES :]] if left_out else messages,
        "left_out": left_out,
        "answer": messages_of(row["response"], EXCERPT_CHARACTERS),
    }


def marked(text: str) -> list[tuple[str, bool]]:
    """Return a text in pieces, each with whether it is a redaction mark."""
    # The marks are at the odd places.
    pieces = [(piece, place % 2 == 1) for place, piece in enumerate(REDACTED.split(text)) if piece]
    return pieces or [(text, False)]


def shortened(text: str, most: int) -> str:
    """Return the beginning of the text, on one line."""
    line = " ".join(text[: 2 * most].split())
    return line if len(line) <= most and len(text) <= 2 * most else line[: most - 1].rstrip() + "…"


def _message(value: Any, most: int) -> Message:
    if not isinstance(value, Mapping):
        return Message("message", (_part("json" if not isinstance(value, str) else "text", value, most),))
    kind = value.get("type")
    if kind in _CALLS and "role" not in value:
        return Message("assistant", (_call(value, most),))
    if kind in _RESULTS and "role" not in value:
        return Message("tool", tuple(_parts(value, most)))
    if kind == "reasoning" and "role" not in value:
        return Message("assistant", tuple(_thinking(value, most)))
    if "role" not in value:
        prompt = value.get("prompt", value)
        return Message("prompt", (_part("text" if isinstance(prompt, str) else "json", prompt, most),))
    role = _ROLES.get(str(value["role"]), str(value["role"]))[:MOST_NAME]
    parts = tuple(part for part, _ in zip(_role_parts(value, role, most), range(MOST_PARTS), strict=False))
    return Message(role, parts, str(value.get("name") or "")[:MOST_NAME])


def _role_parts(value: Mapping[str, Any], role: str, most: int) -> Iterator[Part]:
    for field in ("reasoning_content", "reasoning", "thinking"):
        if value.get(field):
            yield _part("thinking", value[field], most)
            break
    content = value.get("content")
    if role == "tool" and isinstance(content, str):
        yield _part("result", content, most, str(value.get("tool_call_id") or ""))
    elif isinstance(content, list):
        for one in content:
            yield from _parts(one, most)
    elif content not in (None, ""):
        yield _part("text" if isinstance(content, str) else "json", content, most)
    if value.get("refusal"):
        yield _part("text", value["refusal"], most)
    calls = value.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        yield _call(call, most)
    if isinstance(value.get("function_call"), Mapping):
        yield _call(value["function_call"], most)
    if isinstance(value.get("audio"), Mapping):
        yield Part("media", "sound of the answer", "sound")


def _parts(one: Any, most: int) -> Iterator[Part]:
    if not isinstance(one, Mapping):
        yield _part("text" if isinstance(one, str) else "json", one, most)
        return
    kind = one.get("type")
    if kind in _TEXTS or (kind is None and isinstance(one.get("text"), str)):
        yield _part("text", one.get("text", one.get("refusal", "")), most)
    elif kind in ("thinking", "redacted_thinking", "reasoning"):
        yield from _thinking(one, most)
    elif isinstance(kind, str) and kind in _MEDIA:
        yield Part("media", _media(one), _MEDIA[kind])
    elif kind in _CALLS:
        yield _call(one, most)
    elif kind in _RESULTS:
        yield from _results(one, most)
    else:
        yield _part("json", one, most)


def _results(one: Mapping[str, Any], most: int) -> Iterator[Part]:
    name = str(one.get("tool_use_id") or one.get("call_id") or "")
    content = one.get("content", one.get("output"))
    for piece in content if isinstance(content, list) else [content]:
        for part in _parts(piece, most):
            yield Part("result", part.text, name, part.cut) if part.kind in ("text", "json") else part


def _thinking(one: Mapping[str, Any], most: int) -> Iterator[Part]:
    text = one.get("thinking", one.get("text"))
    if text is None and isinstance(one.get("summary"), list):
        text = "\n".join(str(piece.get("text", "")) for piece in one["summary"] if isinstance(piece, Mapping))
    yield _part("thinking", text or "(only its provider can read it)", most)


def _call(one: Any, most: int) -> Part:
    if not isinstance(one, Mapping):
        return _part("json", one, most)
    made = one["function"] if isinstance(one.get("function"), Mapping) else one
    arguments = made.get("arguments", made.get("input", made.get("parameters")))
    return _part("call", _read_json(arguments), most, str(made.get("name") or "a tool"))


def _media(one: Mapping[str, Any]) -> str:
    """Return a short description of the media: kind, and size or address; never its bytes."""
    inner = one.get("image_url") or one.get("input_audio") or one.get("source") or one.get("file") or one
    inner = next(iter(inner.values()), "") if isinstance(inner, Mapping) and len(inner) == 1 else inner
    if isinstance(inner, Mapping):
        data = inner.get("data") or inner.get("file_data")
        kind = inner.get("media_type") or inner.get("format") or inner.get("filename") or ""
        if isinstance(data, str):
            return f"{kind}, {_size(len(data))}".lstrip(", ")
        inner = inner.get("url") or inner.get("file_id") or inner.get("filename") or ""
    address = str(inner)
    if address.startswith("data:"):
        return f"{address[5:60].split(';')[0].split(',')[0]}, {_size(len(address))}"
    return address[:200] or "no address"


def _size(base64_characters: int) -> str:
    size = base64_characters * 3 // 4
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{max(1, size // 2**10)} KiB"


def _read_json(value: Any) -> Any:
    """Return the decoded value of a text that is JSON; else the text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _part(kind: Kind, value: Any, most: int, name: str = "") -> Part:
    if isinstance(value, str):
        return Part(kind, value[:most], name, max(0, len(value) - most))
    text = indented(value, most + 1)
    more = max(1, len(json.dumps(value, ensure_ascii=False)) - most) if len(text) > most else 0
    return Part(kind, text[:most], name, more)


def indented(value: Any, most: int) -> str:
    """Return the beginning of a value as indented JSON: the whole may be a thousand times as long as the original."""
    pieces: list[str] = []
    size = 0
    for piece in _PRETTY.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size >= most:
            break
    return "".join(pieces)[:most]
