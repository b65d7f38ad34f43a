"""Write the figures of `gpu` as JSON, and as Markdown for people."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write(folder: Path, report: Mapping[str, Any]) -> tuple[Path, Path]:
    """Write report.json and report.md into the folder, which is made; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = folder / "report.json", folder / "report.md"
    as_json.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    as_markdown.write_text(markdown(report), encoding="utf-8")
    return as_json, as_markdown


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page: a section for each part, a table for what is flat, lines for what is long."""
    lines = ["# The runbook's report", ""]
    faults = report.get("faults", ())
    lines += [f"**{len(faults)} faults.**" if faults else "**It holds.**", ""]
    lines += [f"- {fault}" for fault in faults]
    for name, part in report.items():
        if name != "faults":
            lines += _section(name, part, 2)
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, part: Any, level: int) -> list[str]:
    lines = ["", f"{'#' * level} {name}", ""]
    if isinstance(part, Mapping):
        flat = {key: value for key, value in part.items() if not isinstance(value, Mapping | list | tuple)}
        long = {key: value for key, value in flat.items() if "\n" in str(value)}
        lines += _table(["", ""], [[key, value] for key, value in flat.items() if key not in long])
        for key, value in long.items():
            lines += ["", f"{key}:", "", "```", str(value).rstrip(), "```"]
        for key in (key for key in part if key not in flat):
            lines += _section(key, part[key], level + 1)
        return lines
    rows = list(part)
    if rows and all(isinstance(row, Mapping) for row in rows):
        head = list(dict.fromkeys(key for row in rows for key in row))
        return lines + _table(head, [[row.get(key, "") for key in head] for row in rows])
    return lines + [f"- {row}" for row in rows]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    cells = [[_cell(value) for value in row] for row in rows]
    return [_row(head), _row(["---"] * len(head)), *map(_row, cells)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
