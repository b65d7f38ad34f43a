"""Format a call as one line, for `whetstone tail`: on a terminal it fits the screen, in a pipe nothing is cut."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from whetstone.domain.ids import version_id
from whetstone.terminal.listing import shorten

VERSION, TOKENS, SECONDS = 16, 10, 7
"""Widths of columns; a longer version is shortened on a terminal only."""
HEAD = ("time UTC", "version", "state", "tokens", "first s", "total s", "prompt")
Row = Mapping[str, Any]


def head(width: int | None) -> str:
    """Return the names of the columns."""
    return _line(HEAD, width)


def line(row: Row, width: int | None) -> str:
    """Return the call as one line; `width`: of the terminal, None in a pipe."""
    version = version_id(row["policy"], row["policy_version"])
    tokens = f"{_number(row['prompt_tokens'])}→{_number(row['completion_tokens'])}"
    times = (_seconds(row["ttft_ms"]), _seconds(row["total_ms"]))
    cells = (f"{row['created_at']:%H:%M:%S}", version, row["status"], tokens, *times, row["prompt"])
    return _line(cells, width)


def _line(cells: Sequence[str], width: int | None) -> str:
    time, version, state, tokens, first, total, prompt = cells
    if width is not None:
        version = shorten(version, VERSION)
    begin = f"{time:8}  {version:{VERSION}} {state:8} {tokens:>{TOKENS}} {first:>{SECONDS}} {total:>{SECONDS}}"
    room = None if width is None else width - cell_len(begin) - 2
    if room is not None and cell_len(prompt) > room:
        prompt = f"{set_cell_size(prompt, room - 1)}…" if room > 1 else ""
    return f"{begin}  {prompt}".rstrip()


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _seconds(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:.2f}"
