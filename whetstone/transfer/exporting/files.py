"""Write the files of exports: JSON lines, Parquet with columns of fixed types, and CSV for rows without messages.

A file is written under another name in the same folder, and renamed once it is complete and on the disk. In Parquet,
types do not depend on the data: values without a fixed shape (tools, metadata, rare fields of a message) are JSON text.
"""

import csv
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from whetstone.database.types import as_json
from whetstone.errors import WhetstoneError

ROWS_AT_ONCE = 500
"""Rows of a Parquet file that are converted to columns at once."""
BUFFER_BYTES = 2**20
STDOUT = "-"
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message that have columns; all others go into `others`, as JSON text."""
_AS_JSON = ("tools", "metadata")
_LISTS_OF_MESSAGES = ("messages", "prompt", "chosen", "rejected")


class CannotWrite(WhetstoneError):
    """The file cannot be written; the message says what to do. No part of the file remains."""


class NotTabular(WhetstoneError):
    """The columns cannot store this message."""


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


class Csv:
    """Writes rows without messages as CSV; the first one names the columns. Null is empty, a value without a fixed
    shape is JSON text."""

    def __init__(self, file: BinaryIO) -> None:
        self._text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        self._writer: csv.DictWriter[str] | None = None

    def add(self, row: Mapping[str, Any]) -> bool:
        """Write the row."""
        if self._writer is None:
            self._writer = csv.DictWriter(self._text, list(row))
            self._writer.writeheader()
        self._writer.writerow({name: _as_cell(value) for name, value in row.items()})
        return True

    def close(self) -> None:
        """Flush the file to the kernel; its owner closes it."""
        self._text.flush()
        self._text.detach()


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
        self._schema = _schema(kind, ids=ids)
        self._table = pyarrow.Table
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> bool:
        """Collect the row until there are enough; return False if its messages do not fit the columns."""
        try:
            self._waiting.append(_as_columns(row))
        except NotTabular:
            return False
        if len(self._waiting) >= ROWS_AT_ONCE:
            self._write()
        return True

    def close(self) -> None:
        """Write the remaining rows and the file's footer."""
        try:
            self._write()
        finally:
            self._writer.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []  # what the disk has refused is not written again at the end
        if waiting:
            self._writer.write_table(self._table.from_pylist(waiting, schema=self._schema))


def check(to: str, kind: str, *, overwrite: bool) -> None:
    """Check that a file with this kind of rows may be written at this path.

    Raises:
        CannotWrite: its suffix names no kind of file, it exists, or its folder does not.
    """
    if to == STDOUT:
        return
    path = Path(to)
    if path.suffix == ".csv" and kind != "ratings":
        raise CannotWrite(f"{to}: only ratings can be CSV, for the others have messages: name it .jsonl or .parquet")
    if path.suffix not in (".jsonl", ".parquet", ".csv"):
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
        rows = JsonLines(sys.stdout.buffer)
        yield rows
        rows.close()
        return
    path = Path(to)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb", buffering=BUFFER_BYTES) as file:
            with closing(_sink(path.suffix, file, kind, ids=ids)) as sink:
                yield sink
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise CannotWrite(f"{to} cannot be written: {error.strerror or error}; no part of it is left") from error
    finally:
        new.unlink(missing_ok=True)


def _sink(suffix: str, file: BinaryIO, kind: str, *, ids: bool) -> Rows:
    if suffix == ".parquet":
        return Parquet(file, kind, ids=ids)
    return Csv(file) if suffix == ".csv" else JsonLines(file)


def _as_cell(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return as_json(value) if isinstance(value, Mapping | list) else value


def format_size(size_bytes: int) -> str:
    """Format a size with its unit."""
    power = min(3, max(0, size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}" if power else f"{size_bytes} bytes"


def _as_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its messages as columns, and its values without a fixed shape as JSON text.

    Raises:
        NotTabular: a message contains more than text.
    """
    named = {name: value for name, value in row.items() if value is not None}
    messages = {name: [_message(one) for one in named[name]] for name in _LISTS_OF_MESSAGES if name in named}
    return {**row, **messages, **{name: as_json(named[name]) for name in _AS_JSON if name in named}}


def _schema(kind: str, *, ids: bool) -> Any:
    """Return the pyarrow.Schema of a kind of row: trajectories, preferences, sft or ratings."""
    import pyarrow as pa

    text, number, whole, yes_no = pa.string(), pa.float64(), pa.int64(), pa.bool_()
    instant = pa.timestamp("us", tz="UTC")
    call = pa.struct({"id": text, "type": text, "function": pa.struct({"name": text, "arguments": text})})
    message = pa.struct(
        {
            "role": text, "content": text, "name": text, "tool_calls": pa.list_(call), "tool_call_id": text,
            "reasoning_content": text, "others": text,
        }
    )  # fmt: skip
    messages = pa.list_(message)
    if kind == "sft":
        return pa.schema(
            {
                "messages": messages, "tools": text, "source": text, "reward": number, "task": text, "group_id": text,
                "trajectory_id": text, "version": whole,
            }
        )  # fmt: skip
    if kind == "preferences":
        return pa.schema(
            {
                "prompt": messages, "chosen": messages, "rejected": messages, "tools": text, "chosen_reward": number,
                "rejected_reward": number, "task": text, "group_id": text, "chosen_trajectory_id": text,
                "rejected_trajectory_id": text, "chosen_version": whole, "rejected_version": whole,
            }
        )  # fmt: skip
    if kind == "ratings":
        return pa.schema(
            {
                "rater": text, "target": text, "trajectory_id": text, "completion_id": text, "source": text,
                "reward": number, "score": whole, "comment": text, "demonstration": text, "policy": text,
                "version": whole, "group_id": text, "task": text, "split": text, "state": text, "key_id": text,
                "feedback_id": text, "created_at": instant, "metadata": text,
            }
        )  # fmt: skip
    fields = {
        "trajectory_id": text, "group_id": text, "policy": text, "task": text, "split": text, "no_train": yes_no,
        "state": text, "reward": number, "reward_source": text, "first_version": whole, "last_version": whole,
        "why_not_trained": text, "trained_in_step": whole, "metadata": text, "end_user": text, "created_at": instant,
        "ended_at": instant, "conversation": whole, "endpoint": text, "versions": pa.list_(whole),
        "completion_ids": pa.list_(text), "messages": messages, "tools": text,
    }  # fmt: skip
    if ids:
        fields |= {
            "token_ids": pa.list_(pa.int32()), "sampled": pa.list_(yes_no),
            "inference_logprobs": pa.list_(pa.float32()),
        }  # fmt: skip
    return pa.schema(fields)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NotTabular
    texts = {name: message.get(name) for name in ("role", "name", "tool_call_id", "reasoning_content")}
    if not all(value is None or isinstance(value, str) for value in texts.values()):
        raise NotTabular
    others = {name: value for name, value in message.items() if name not in MESSAGE and value is not None}
    return {
        **texts,
        "content": _text(message.get("content")),
        "tool_calls": _calls(message.get("tool_calls")),
        "others": as_json(others) if others else None,
    }


def _text(content: Any) -> str | None:
    """Return a content's text, also if it came as parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise NotTabular
    texts: list[Any] = [
        part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise NotTabular
    return "".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    try:
        converted = [
            {
                "id": call.get("id"),
                "type": call.get("type"),
                "function": {name: call["function"].get(name) for name in ("name", "arguments")},
            }
            for call in calls
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise NotTabular from error
    texts = (text for call in converted for text in (call["id"], call["type"], *call["function"].values()))
    if not all(text is None or isinstance(text, str) for text in texts):
        raise NotTabular
    return converted
