"""`whetstone logs`: what the parts that `up` runs have written last, and what they write from now on."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from whetstone.cli.options import ConfigOption, DataOption
from whetstone.config.settings import SettingsError, load

POLL_S = 0.25
BLOCK = 64 * 1024
"""Bytes that are read at once."""


def logs(
    part: Annotated[
        str | None,
        typer.Argument(help="vllm (all of vllm-1, vllm-2, …), proxy, judge, trainer or redis [all parts]"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they are written, until Ctrl-C")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each part")] = 20,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the last lines of each part's log; with `--follow`, new lines too.

    Example:

        whetstone logs trainer --follow
    """
    folder = load(config, data=data).data / "logs"
    parts = _logs(folder)
    if not parts:
        raise SettingsError(f"there are no logs in {folder}; `whetstone up` writes them")
    wanted = re.compile(".*" if part is None else rf"{re.escape(part)}(-\d+)?")
    chosen = [name for name in parts if wanted.fullmatch(name)]
    if not chosen:
        raise typer.BadParameter(f"no part {part!r} has a log in {folder}; those that have: {', '.join(parts)}")
    width = 0 if chosen == [part] else max(map(len, parts))
    tails = {name: _Tail(parts[name], lines) for name in chosen}
    try:
        for name, tail in tails.items():
            _print(name, tail.new_lines(), width)
            if not follow:
                _print(name, tail.unfinished(), width)
        while follow:
            time.sleep(POLL_S)
            for name, path in _logs(folder).items():
                if wanted.fullmatch(name) and name not in tails:
                    tails[name] = _Tail(path, None)
            for name, tail in tails.items():
                _print(name, tail.new_lines(), width)
    except KeyboardInterrupt:
        return


def _logs(folder: Path) -> dict[str, Path]:
    """Return the files of the parts, by their names."""
    return {path.stem: path for path in sorted(folder.glob("*.log"))}


def _print(part: str, lines: Iterable[str], width: int) -> None:
    """Print lines, behind the part's name where there are several parts."""
    for line in lines:
        typer.echo(f"{part:{width}} | {line}" if width else line)


class _Tail:
    """A file that grows, and how far it was read. Where it was replaced or cut, it is read from its beginning."""

    def __init__(self, path: Path, lines: int | None) -> None:
        """`lines`: begin with so many of the last ones; None: with the first."""
        self._path, self._lines = path, lines
        self._pieces: list[bytes] = []
        """Of a line that has not ended."""
        self._inode, self._offset = -1, 0

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that have ended since.

        Raises:
            SettingsError: the file cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            # The file that comes in its place is new, even with the same inode.
            self._inode = -1
            return
        except OSError as error:
            raise SettingsError(f"{self._path} cannot be read: {error.strerror}") from error
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._offset = 0 if self._lines is None else _start_of_last(file.fileno(), self._lines)
                self._inode, self._lines, self._pieces = state.st_ino, None, []
            file.seek(self._offset)
            while block := file.read(BLOCK):
                self._offset += len(block)
                first, *others = block.split(b"\n")
                self._pieces.append(first)
                for other in others:
                    yield self._take()
                    self._pieces = [other]

    def unfinished(self) -> list[str]:
        """Return the line that has not ended, if there is one."""
        return [line] if (line := self._take()) else []

    def _take(self) -> str:
        line, self._pieces = b"".join(self._pieces), []
        return line.decode(errors="replace")


def _start_of_last(descriptor: int, lines: int) -> int:
    """Return the offset at which the last lines of a file begin, reading it from its end."""
    # The newline at the very end ends the last line; it begins none.
    offset, wanted = os.fstat(descriptor).st_size, lines + 1
    while offset > 0:
        start = max(0, offset - BLOCK)
        block = os.pread(descriptor, offset - start, start)
        count = block.count(b"\n")
        if count >= wanted:
            at = len(block)
            for _ in range(wanted):
                at = block.rindex(b"\n", 0, at)
            return start + at + 1
        wanted, offset = wanted - count, start
    return 0
