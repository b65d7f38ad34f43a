"""Save the rows of a step whose numbers were not finite, for debugging.

One line of JSON for each row, its fields named as in `trainer.domain.rows.Row`. NaN (tokens that were not sampled have
no logprob) and infinity are written as null: JSON has neither. Supports of constrained tokens are in base64.
"""

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.rows import Row

MOST = 16
"""Number of files that stay, the newest: a policy whose every step fails must not fill the disk."""


def dump(folder: Path, step_id: str, rows: Sequence[Row]) -> Path:
    """Write the rows into `folder`, complete or not at all. Return the file.

    Raises:
        OSError: the disk is full or refuses the write; nothing is left there.
    """
    path = folder / f"{step_id.replace('#', '-')}.jsonl"
    unfinished = path.with_suffix(".tmp")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            for row in rows:
                plain = {name: _plain(value) for name, value in asdict(row).items()}
                file.write(json.dumps(plain, separators=(",", ":"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    for old in sorted(folder.glob("*.jsonl"), key=lambda file_path: file_path.stat().st_mtime)[:-MOST]:
        old.unlink(missing_ok=True)
    return path


def read(path: Path) -> list[Row]:
    """Return the rows that `dump` wrote; null becomes NaN, also where it was infinity. `Learner.step` accepts them.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [_row(values) for values in lines]


def _row(values: Mapping[str, Any]) -> Row:
    # Earlier versions wrote one advantage for a whole row, no pairs, and nothing of a teacher, past attempts or tools.
    values = {
        "advantages_T": [values.get("advantage")] * len(values["token_ids_T"]),
        "pair": "",
        "teacher_ids": (),
        "top_ids_N": (),
        "top_logprobs_N": (),
        "replayed": False,
        "tool_spans": (),
        **values,
    }
    spans = tuple(_span(span) for span in values.get("constrained", ()))
    plain = {field.name: _back(values[field.name]) for field in fields(Row) if field.name != "constrained"}
    return Row(**plain, constrained=spans)


def _span(values: Mapping[str, Any]) -> ConstrainedSpan:
    constraints: dict[str, Any] = {
        name: None if value is None else _back(value) for name, value in values["constraints"].items()
    }
    supports = base64.b64decode(values["supports"])
    return ConstrainedSpan(**{**values, "constraints": Constraints(**constraints), "supports": supports})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_back(one) for one in value)
    return math.nan if value is None else value
