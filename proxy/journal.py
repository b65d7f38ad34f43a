"""The append-only journal between a served call and SQL: its segments, their bound, and what waits in them.

A write to the page cache survives `kill -9` of the process; `to_sync` gives what a loss of power would still take. Each
process appends to segments of its own; those of the dead are read at the next start. A segment is removed when SQL has
all of it, and emptied before that when nothing in it waits. Knows nothing of what records mean.
"""

import contextlib
import errno
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from proxy.segments import FileSegment, MemorySegment, Record, Segment

SEGMENT_BYTES = 8 * 2**20
"""Each is an open file, as long as SQL lacks some of it."""
FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_EVERY_S = 1.0
"""How often a journal that could not be written is asked whether it can be again."""


class Journal:
    """The folder's segments. Used from one thread."""

    def __init__(self, folder: Path, max_bytes: int | None = None, *, in_memory: bool = False) -> None:
        """`max_bytes`: of all its segments; without it only the disk ends it. `in_memory`: nothing more is written to
        the folder; what the dead left there is still read.

        Raises:
            OSError: the folder cannot be made or written, or its file system reserves no blocks or maps no files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._in_memory = in_memory
        self._number = 0
        self._full: set[Segment] = set()
        self._full_bytes = 0
        self._unsynced: set[Segment] = set()
        self._unsynced_folder = False
        self._failed_at: float | None = None
        self._current = self._new_segment()
        try:
            self._current.probe()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._failed_at = time.monotonic()

    @property
    def size_bytes(self) -> int:
        """What its records take, on the disk or in memory; the file that is written has up to 1 MiB more."""
        return self._current.size_bytes + self._full_bytes

    @property
    def full(self) -> bool:
        """Whether the next record would not be taken, as far as is known: for its bound, or by what the disk said."""
        if self._failed_at is not None:
            if time.monotonic() - self._failed_at <= PROBE_EVERY_S:
                return True
            try:
                self._current.probe()
                self._failed_at = None
            except OSError:
                self._failed_at = time.monotonic()
                return True
        return self._current.size_bytes + self._full_bytes >= self._max_bytes

    def append(self, payload: bytes) -> Record:
        """Write a record; hand it back to `settled` once SQL has it.

        Raises:
            OSError: nothing was written.
        """
        current = self._current
        if current.size_bytes + self._full_bytes >= self._max_bytes:
            raise OSError(errno.EDQUOT, f"the journal has its {self._max_bytes} bytes")
        try:
            if current.size_bytes > SEGMENT_BYTES:
                full, current = current, self._new_segment()
                self._current = current
                self._retire(full)
            record = current.append(payload)
        except OSError:
            self._failed_at = time.monotonic()
            raise
        self._failed_at = None
        self._unsynced.add(current)
        return record

    def to_sync(self) -> list[int]:
        """Descriptors of all that is not on the disk yet, for `sync`."""
        lacking, self._unsynced = self._unsynced, set()
        found = [segment.descriptor() for segment in lacking if segment.outstanding]
        if self._unsynced_folder:
            found.append(os.open(self._folder, os.O_RDONLY))
            self._unsynced_folder = False
        return [descriptor for descriptor in found if descriptor is not None]

    def left_behind(self) -> Iterator[tuple[FileSegment, list[Record]]]:
        """The records of dead processes, segment by segment, oldest first; they are this journal's to settle now."""
        for path in sorted(self._folder.glob("*.journal"), key=lambda found: found.stat().st_mtime_ns):
            try:
                segment = FileSegment(path)
            except BlockingIOError:
                continue
            records = segment.records()
            self._retire(segment)
            if records:
                yield segment, records

    def settled(self, record: Record) -> None:
        """Say that SQL has this record."""
        segment = record.segment
        segment.outstanding -= 1
        if segment.outstanding:
            return
        if segment in self._full:
            self._full.remove(segment)
            self._full_bytes -= segment.size_bytes
            self._unsynced.discard(segment)
            segment.close()
        elif segment is self._current:
            segment.clear()

    def close(self) -> None:
        """Leave only what SQL does not have."""
        for segment in (self._current, *self._full):
            segment.close()

    def _retire(self, segment: Segment) -> None:
        if segment.outstanding:
            self._full.add(segment)
            self._full_bytes += segment.size_bytes
            segment.seal()
        else:
            segment.close()

    def _new_segment(self) -> Segment:
        if self._in_memory:
            return MemorySegment()
        while True:
            self._number += 1
            path = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}-{self._number:06d}.journal"
            # A process that starts at this moment may take it for a dead one's, and remove it.
            with contextlib.suppress(BlockingIOError):
                segment = FileSegment(path)
                if path.exists():
                    self._unsynced_folder = True
                    return segment
                segment.close()
