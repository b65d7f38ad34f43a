"""Read rewards from a file (JSON Lines or CSV), to compare judges with them."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from judge.audit.store import Reference
from judge.errors import JudgeError

PART = "parts."
"""Prefix of the columns of a CSV file that are parts."""


class NoReferences(JudgeError):
    """There is nothing to compare judges with; the message gives the remedy."""


def from_file(path: Path) -> dict[str, Reference]:
    """Return reference by trajectory id; the last line of each counts.

    A `.csv` has the columns `trajectory_id`, `reward` and, for parts, `parts.<name>`, where an empty cell means no
    value; any other file has one JSON object per line: `{"trajectory_id": …, "reward": …, "parts": {…}}`.

    Raises:
        NoReferences: the file cannot be read, or a line has another form.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            is_csv = path.suffix.lower() == ".csv"
            lines = _of_csv(csv.DictReader(file)) if is_csv else enumerate(file, 1)
            return dict(_reference(path, number, line) for number, line in lines if is_csv or line.strip())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise NoReferences(f"{path} cannot be read: {error}") from error


def _of_csv(rows: "csv.DictReader[str]") -> Iterator[tuple[int, Any]]:
    for row in rows:
        cells = {name: cell for name, cell in row.items() if name and cell}
        parts = {name.removeprefix(PART): cell for name, cell in cells.items() if name.startswith(PART)}
        yield rows.line_num, {**cells, "parts": parts}


def _reference(path: Path, line: int, row: Any) -> tuple[str, Reference]:
    """Parse a line of JSON, or the cells of a row. Raises NoReferences, which names the line."""
    try:
        content = json.loads(row) if isinstance(row, str) else row
        name, parts = content["trajectory_id"], content.get("parts") or {}
        if not isinstance(name, str) or not isinstance(parts, Mapping):
            raise TypeError
        return name, Reference(_number(content["reward"]), {part: _number(value) for part, value in parts.items()})
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
        raise NoReferences(
            f'{path}, line {line}: not {{"trajectory_id": "…", "reward": number[, "parts": {{"…": number}}]}}'
        ) from None


def _number(content: Any) -> float:
    number = float(content)
    if not math.isfinite(number):
        raise ValueError(content)
    return number
