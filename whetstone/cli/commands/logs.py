"""`whetstone logs`: what the parts that `up` runs have written last, and what they write from now on."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from whetstone.cli.options import ConfigOption, DataOption
from whetstone.config.settings import SettingsError, load

POLL_S = 0.25
BLOCK = 64 * 1024
"""Bytes that are read at once."""


def logs(
    part: Annotated[str | None, typer.Argument(help="vllm, proxy, judge, trainer or redis [all of them]")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each part")] = 20,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the last lines that the parts of a stack have written, and with `--follow` those that they write.

    Example:

        whetstone logs trainer --follow
    """
    folder = load(config, data=data).data / "logs"
    names = [path.stem for path in sorted(folder.glob("*.log"))]
    if not names:
        raise SettingsError(f"there are no logs in {folder}; `whetstone up` writes them")
    if part is not None and part not in names:
        raise typer.BadParameter(f"no part {part!r} has a log in {folder}; those that have: {', '.join(names)}")
    width = 0 if part else max(map(len, names))
    tails: dict[str, _Tail] = {}
    for name in [part] if part else names:
        tails[name] = _Tail(folder / f"{name}.log", lines)
        _print(name, tails[name].new_lines(), width)
    with suppress(KeyboardInterrupt):
        while follow:
            time.sleep(POLL_S)
            for path in [] if part else sorted(folder.glob("*.log")):
                tails.setdefault(path.stem, _Tail(path, None))
            for name, tail in tails.items():
                _print(name, tail.new_lines(), width)


def _print(part: str, lines: Iterator[str], width: int) -> None:
    """Print lines, behind the part's name where there are several parts."""
    for line in lines:
        typer.echo(f"{part:{width}} | {line}" if width else line)


class _Tail:
    """A file that grows, and how far it was read. Where it was replaced or emptied, it is read from its beginning."""

    def __init__(self, path: Path, lines: int | None) -> None:
        """`lines`: begin with so many of the last ones; None: with the first."""
        self._path, self._rest = path, b""
        self._inode, self._offset = -1, 0
        if lines is not None:
            with path.open("rb") as file:
                self._inode, self._offset = os.fstat(file.fileno()).st_ino, _start_of_last(file.fileno(), lines)

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that have ended since."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._inode, self._offset, self._rest = state.st_ino, 0, b""
            file.seek(self._offset)
            while block := file.read(BLOCK):
                self._offset += len(block)
                *ended, self._rest = (self._rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in ended)


def _start_of_last(descriptor: int, lines: int) -> int:
    """Return the offset at which the last lines of a file begin, reading it from its end."""
    end = os.fstat(descriptor).st_size
    # The newline at the very end ends the last line; it begins none.
    offset, wanted = end, lines + 1
    while offset > 0:
        start = max(0, offset - BLOCK)
        block = os.pread(descriptor, offset - start, start)
        count = block.count(b"\n")
        if count >= wanted:
            for _ in range(wanted - 1):
                block = block[: block.rindex(b"\n")]
            return start + block.rindex(b"\n") + 1
        wanted, offset = wanted - count, start
    return 0
