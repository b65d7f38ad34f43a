"""Lines of JSON made safe to stand between tags, and made to fit. Pure; knows no tag, no attempt and no prompt.

Whatever is left out, each line stays one JSON object, and a note says how much is missing where.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from judge.ruler.conversation import NOTE

LEAST_LINE = 200
"""A line is cut to no fewer characters than this."""
NOTE_CHARS = 64
"""Room for a note, its line break included."""

_MARK_CHARS = 40
_UNSAFE = re.compile(
    # Tags and entities, in their wide and small forms too; what some reader takes for a line break; what hides or
    # reorders text; halves of characters.
    "[<>&\uff1c\uff1e\uff06\ufe64\ufe65\ufe60\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)


def escaped(line: str) -> str:
    """JSON that says the same, without tags, entities, line breaks of any kind, and text that hides."""
    return _UNSAFE.sub(_escape, line)


def shortened(lines: Sequence[str], room: int) -> tuple[list[str], int]:
    """Lines of together at most `room` characters, line breaks included, and how many characters are left out.

    Whole lines go first, from the middle; the line at the gap and, at last, the ends are cut inside.
    """
    if not lines or chars(lines) <= room:
        return list(lines), 0
    if len(lines) == 1:
        line, out = cut(lines[0], room - 1)
        return [line], out
    most = cap([len(lines[0]) + 1, len(lines[-1]) + 1], room - (NOTE_CHARS if len(lines) > 2 else 0)) - 1
    (first, out), (last, out_of_last) = cut(lines[0], most), cut(lines[-1], most)
    left = room - NOTE_CHARS - chars([first, last])
    begin, end = 1, len(lines) - 1
    while begin < end:
        # From both sides in turn, the later one first: the end says most of how it went.
        turn = (end - 1, begin) if len(lines) - end <= begin else (begin, end - 1)
        if (place := next((one for one in turn if len(lines[one]) < left), None)) is None:
            break
        left -= len(lines[place]) + 1
        begin, end = (begin, end - 1) if place == end - 1 else (begin + 1, end)
    head = [first, *lines[1:begin]]
    if begin < end and left > LEAST_LINE:
        line, out_of_line = cut(lines[begin], left - 1)
        head.append(line)
        out += out_of_line
        begin += 1
    gap = sum(map(len, lines[begin:end]))
    note = [_json({NOTE: f"{gap} characters left out here"})] if begin < end else []
    return [*head, *note, *lines[end:-1], last], out + out_of_last + gap


def cut(line: str, room: int) -> tuple[str, int]:
    """The line, still a JSON object, with at most `room` (at the least `LEAST_LINE`) characters, and how many it lost.

    Its long strings lose their middles, all down to the same length. Where that is not enough, its role stays and the
    rest becomes text.
    """
    room = max(room, LEAST_LINE)
    if len(line) <= room:
        return line, 0
    told = _loaded(line)
    role = told.get("role") if isinstance(told, dict) else None
    kept = {"role": role} if isinstance(role, str) and role.isalnum() and len(role) <= 32 else {}
    best = _longest(told, room) or _longest({**kept, "cut": line}, room)
    assert best is not None, "a role and a note fit any line"
    return best, len(line) - len(best)


def _longest(told: Any, room: int) -> str | None:
    """The line with as much of its strings as fits; None: with none of them it is too long."""
    low, high, best = 0, room, None
    while low <= high:
        most = (low + high) // 2
        try:
            said = escaped(_json(_capped(told, most)))
        except RecursionError:
            return None
        low, high, best = (most + 1, high, said) if len(said) <= room else (low, most - 1, best)
    return best


def _capped(value: Any, most: int) -> Any:
    """The value with at most `most` characters of each string, and a word on those it lost."""
    match value:
        case str() if len(value) > most + _MARK_CHARS:
            head, tail = most - most // 2, most // 2
            return f"{value[:head]}[{len(value) - most} characters left out here]{value[len(value) - tail :]}"
        case list():
            return [_capped(item, most) for item in value]
        case dict():
            return {key: _capped(item, most) for key, item in value.items()}
    return value


def cap(lengths: Sequence[int], room: int) -> int:
    """The most that each may have, so that all together have at most `room`."""
    for place, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - place)
        if length > share:
            return share
        room -= length
    return max(lengths, default=0)


def chars(lines: Sequence[str]) -> int:
    return sum(map(len, lines)) + len(lines)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code <= 0xFFFF else json.dumps(found[0])[1:-1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _loaded(line: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        return line
