"""Write the files of exports: JSON lines, and Parquet with columns of fixed types.

A file is written under another name in the same folder, and renamed once it is complete and on the disk.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from whetstone.errors import WhetstoneError
from whetstone.transfer.exporting.parquet_columns import NotTabular, as_columns, schema

ROWS_AT_ONCE = 500
"""Rows of a Parquet file that are converted to columns at once."""
BUFFER_BYTES = 2**20
STDOUT = "-"


class CannotWrite(WhetstoneError):
    """The file cannot be written; the message says what to do. No part of the file remains."""


class Rows(Protocol):
    """A file that takes rows."""

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False if this kind of file cannot store it."""

    def close(self) -> None:
        """Write what remains; no row can be added after that."""


class JsonLines:
    """Writes each row as a line of JSON."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def add(self, row: Mapping[str, Any]) -> bool:
        """Write the row."""
        self._file.write(self._encode(row) + b"\n")
        return True

    def close(self) -> None:
        """Flush the file to the kernel; its owner closes it."""
        self._file.flush()


class Parquet:
    """Writes compressed columns; needs pyarrow."""

    def __init__(self, file: BinaryIO, kind: str, *, ids: bool) -> None:
        """Open a file for this kind of rows.

        Raises:
            CannotWrite: pyarrow is not installed.
        """
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise CannotWrite(
                "Parquet needs pyarrow (pip install -e '.[export]' in the repository), else name a .jsonl file"
            ) from error
        self._schema = schema(kind, ids=ids)
        self._table = pyarrow.Table
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> bool:
        """Collect the row until there are enough; return False if its messages do not fit the columns."""
        try:
            self._waiting.append(as_columns(row))
        except NotTabular:
            return False
        if len(self._waiting) >= ROWS_AT_ONCE:
            self._write()
        return True

    def close(self) -> None:
        """Write the remaining rows and the file's footer."""
        self._write()
        self._writer.close()

    def _write(self) -> None:
        if self._waiting:
            self._writer.write_table(self._table.from_pylist(self._waiting, schema=self._schema))
            self._waiting = []


def check(to: str, *, overwrite: bool) -> None:
    """Check that a file may be written at this path.

    Raises:
        CannotWrite: its suffix names no kind of file, it exists, or its folder does not.
    """
    if to == STDOUT:
        return
    path = Path(to)
    if path.suffix not in (".jsonl", ".parquet"):
        raise CannotWrite(f"{to}: say what it is to be by its end: .jsonl or .parquet (- writes JSON lines to stdout)")
    if not path.parent.is_dir():
        raise CannotWrite(f"there is no folder {path.parent}: make it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise CannotWrite(f"{to} is there already: name another file, or say --overwrite")


@contextmanager
def opened(to: str, kind: str, *, ids: bool) -> Iterator[Rows]:
    """Open the file to add rows to. It gets its name at the end, unless an error occurs.

    Raises:
        CannotWrite: the disk refuses.
    """
    if to == STDOUT:
        with closing(JsonLines(sys.stdout.buffer)) as rows:
            yield rows
        return
    path = Path(to)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb", buffering=BUFFER_BYTES) as file:
            sink: Rows = JsonLines(file) if path.suffix == ".jsonl" else Parquet(file, kind, ids=ids)
            with closing(sink):
                yield sink
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise CannotWrite(f"{to} cannot be written: {error.strerror or error}; no part of it is left") from error
    finally:
        new.unlink(missing_ok=True)


def format_size(size_bytes: int) -> str:
    """Format a size with its unit."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return ""
