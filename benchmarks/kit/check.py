"""The frame of every check: a folder for what it writes, its figures and faults on the console, its exit code."""

import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_FAULTS_SHOWN = 20


def end_on_sigterm() -> None:
    """Let SIGTERM end the run as SIGINT does: the programs that it started then end with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def data_folder(check: str, given: Path | None) -> Iterator[Path]:
    """Yield the folder for databases, journals and logs: the given one, which stays, or a temporary one."""
    with tempfile.TemporaryDirectory(prefix=f"whetstone-{check}-") as temporary:
        data = (given or Path(temporary)).resolve()
        data.mkdir(parents=True, exist_ok=True)
        yield data


def figures_table(figures: Mapping[str, str]) -> Table:
    """Return a table of figures by name."""
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, value)
    return table


def counted(counts: Counter[Any]) -> str:
    """Return counts in one line, the largest first."""
    return ", ".join(f"{what}: {count}" for what, count in counts.most_common()) or "none"


def verdict(faults: Sequence[str], console: Console, holds: str = "it holds") -> int:
    """Print the first faults and, as the last line, whether the check holds; return the exit code."""
    for fault in faults[:MAX_FAULTS_SHOWN]:
        console.print(f"FAULT {fault}", markup=False, highlight=False)
    console.print(f"{len(faults)} faults: it does not hold" if faults else holds, highlight=False)
    return 1 if faults else 0
