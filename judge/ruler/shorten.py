"""Escape lines of JSON so that they can stand between tags, and shorten them to fit. Pure.

When something is left out, each line stays one JSON object, and a note records how much is missing where. Lengths are
those of escaped lines, but only what is shown is escaped: the time for a prompt depends on its room, and little on what
is left out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from judge.ruler.conversation import NOTE, to_json

LEAST_LINE = 200
"""A line is cut to no fewer characters than this."""
NOTE_CHARS = 64
"""Room for a note, including its line break."""

_MARK_CHARS = 40
_RANGES = (
    # Tags and entities, in their wide and small forms too.
    *(range(ord(one), ord(one) + 1) for one in "<>&\uff1c\uff1e\uff06\ufe64\ufe65\ufe60"),
    # Characters that some reader takes for a line break, that hide or reorder text, or that are halves of characters.
    *(range(0x7F, 0xA0), range(0x2028, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000), range(0xE0000, 0xE0080)),
)
_UNSAFE = re.compile(f"[{''.join(f'{chr(codes[0])}-{chr(codes[-1])}' for codes in _RANGES)}]")
_UNSAFE_ASCII = "<>&\x7f"
_ESCAPES = {
    code: f"\\u{code:04x}" if code <= 0xFFFF else json.dumps(chr(code))[1:-1] for codes in _RANGES for code in codes
}


def escaped(line: str) -> str:
    """Return equivalent JSON without tags, entities, line breaks of any kind, and characters that hide text."""
    return line.translate(_ESCAPES) if _UNSAFE.search(line) else line


@dataclass(slots=True)
class Line:
    """A line of JSON. Its length is that of what is shown: `str(line)`, its text escaped."""

    text: str
    is_gap: bool = False
    """Whether it is ours, and says how much is left out in its place."""
    _chars: int = field(init=False)

    def __post_init__(self) -> None:
        self._chars = _escaped_chars(self.text)

    def __len__(self) -> int:
        return self._chars

    def __str__(self) -> str:
        return escaped(self.text)


def shortened(lines: Sequence[Line], room: int) -> list[Line]:
    """Return lines of together at most `room` characters, line breaks included.

    Whole lines are removed first, from the middle; then the line at the gap and, at last, the ends are cut inside.
    """
    if not lines or chars(lines) <= room:
        return list(lines)
    if len(lines) == 1:
        return [cut(lines[0], room - 1)]
    most = cap([len(lines[0]) + 1, len(lines[-1]) + 1], room - (NOTE_CHARS if len(lines) > 2 else 0)) - 1
    first, last = cut(lines[0], most), cut(lines[-1], most)
    left = room - NOTE_CHARS - chars([first, last])
    begin, end = 1, len(lines) - 1
    while begin < end:
        # From both sides in turn, the later one first: the end shows best how the attempt went.
        turn = (end - 1, begin) if len(lines) - end <= begin else (begin, end - 1)
        if (place := next((one for one in turn if len(lines[one]) < left), None)) is None:
            break
        left -= len(lines[place]) + 1
        begin, end = (begin, end - 1) if place == end - 1 else (begin + 1, end)
    head = [first, *lines[1:begin]]
    if begin < end and left > LEAST_LINE:
        head.append(cut(lines[begin], left - 1))
        begin += 1
    gap = sum(map(len, lines[begin:end]))
    note = [Line(to_json({NOTE: f"{gap} characters left out here"}), is_gap=True)] if begin < end else []
    return [*head, *note, *lines[end:-1], last]


def cut(line: Line, room: int) -> Line:
    """Return the line with at most `room` characters, still a JSON object.

    `room` counts as at least `LEAST_LINE`. Its long strings lose their middles, all down to the same length. Where that
    is not enough, its role stays and the rest becomes text.
    """
    room = max(room, LEAST_LINE)
    if len(line) <= room:
        return line
    try:
        message = json.loads(line.text)
    except RecursionError:
        message = line.text
    role = message.get("role") if isinstance(message, dict) else None
    role_field = {"role": role} if isinstance(role, str) and role.isalnum() and len(role) <= 32 else {}
    best = _longest(message, room) or _longest({**role_field, "cut": str(line)}, room)
    assert best is not None, "a role and a note fit any line"
    return best


def _longest(message: Any, room: int) -> Line | None:
    """Return the line with as much of its strings as fits; None: it is too long even without them.

    Characters of the line = those with empty strings + those of the strings; only the latter are computed at each
    length.
    """
    texts = _long_texts(message, room)
    if texts is None:
        return None
    try:
        frame = len(Line(to_json(_capped(message, 0)))) - _together(texts, 0)
        # Where raw strings alone are too long, so is the line.
        low, high, best = 0, cap([len(text) for text in texts], room), None
        while low <= high:
            most = (low + high) // 2
            fits = frame + _together(texts, most) <= room
            low, high, best = (most + 1, high, most) if fits else (low, most - 1, best)
        return None if best is None else Line(to_json(_capped(message, best)))
    except RecursionError:
        return None


def _long_texts(message: Any, room: int) -> list[str] | None:
    """Return its strings that may be cut, in any order; None: without them it is longer than `room` already."""
    texts: list[str] = []
    left, values = room, [message]
    while values:
        value = values.pop()
        left -= 1
        match value:
            case str() if len(value) > _MARK_CHARS:
                texts.append(value)
            case str():
                left -= len(value) + 1
            case list():
                values += value
            case dict():
                left -= sum(map(len, value)) + 3 * len(value)
                values += value.values()
        if left < 0:
            return None
    return texts


def _together(texts: Sequence[str], most: int) -> int:
    """Return the characters of the strings with at most `most` of each."""
    return _escaped_chars(to_json([_short(text, most) for text in texts]))


def _capped(value: Any, most: int) -> Any:
    """Return the value with at most `most` characters of each string, and a remark on what was cut."""
    match value:
        case str():
            return _short(value, most)
        case list():
            return [_capped(item, most) for item in value]
        case dict():
            return {key: _capped(item, most) for key, item in value.items()}
    return value


def _short(text: str, most: int) -> str:
    if len(text) <= most + _MARK_CHARS:
        return text
    head, tail = most - most // 2, most // 2
    return f"{text[:head]}[{len(text) - most} characters left out here]{text[len(text) - tail :]}"


def cap(lengths: Sequence[int], room: int) -> int:
    """Return the largest length for each, so that all together have at most `room`."""
    for place, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - place)
        if length > share:
            return share
        room -= length
    return max(lengths, default=0)


def chars(lines: Sequence[str | Line]) -> int:
    """Return the characters of all lines, including a line break after each."""
    return sum(map(len, lines)) + len(lines)


def _escaped_chars(line: str) -> int:
    """Return the length of the escaped line."""
    if line.isascii():
        return len(line) + 5 * sum(map(line.count, _UNSAFE_ASCII))
    return len(escaped(line))
