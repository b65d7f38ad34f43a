"""The append-only journal between a served call and SQL: its segments, their bound, and what waits in them.

A write to the page cache survives `kill -9` of the process; `to_sync` gives what a loss of power would still take. Each
process appends to segments of its own; those of the dead are read at the next start. A segment is removed when SQL has
all of it, and emptied before that when nothing in it waits. While SQL keeps up two small ones take turns: their memory
is there, and what SQL has is soon overwritten. Knows nothing of what records mean.
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
TURN_BYTES = 2**20
"""From here on another segment is written, if all those before are empty."""
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
        self._process = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._number = 0
        self._full: set[Segment] = set()
        self._spare: Segment | None = None
        """Empty, to be written after the current one."""
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
        """What its records take, on the disk or in memory; the file that is written, and the one that takes turns with
        it, have up to 2 MiB more."""
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

    def append(self, payload: bytes | bytearray) -> Record:
        """Write a record; tell `settled` once SQL has it.

        Raises:
            OSError: nothing was written.
        """
        current = self._current
        if current.size_bytes + self._full_bytes >= self._max_bytes:
            raise OSError(errno.EDQUOT, f"the journal has its {self._max_bytes} bytes")
        try:
            if current.size_bytes > TURN_BYTES and (not self._full or current.size_bytes > SEGMENT_BYTES):
                current = self._turn(current)
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
        for path in _oldest_first(self._folder):
            try:
                segment = FileSegment(path)
            except BlockingIOError:
                continue
            records = segment.records()
            self._retire(segment)
            if records:
                yield segment, records

    def settled(self, segment: Segment, records: int = 1) -> None:
        """Say that SQL has so many of a segment's records."""
        segment.outstanding -= records
        if segment.outstanding:
            return
        if segment in self._full:
            self._full.remove(segment)
            self._full_bytes -= segment.size_bytes
            self._unsynced.discard(segment)
            if self._spare is None and segment.spare():
                self._spare = segment
            else:
                segment.close()
        elif segment is self._current:
            segment.clear()

    def close(self) -> None:
        """Leave only what SQL does not have."""
        for segment in (self._current, *self._full, self._spare):
            if segment is not None:
                segment.close()

    def _turn(self, full: Segment) -> Segment:
        """What is written now: another segment, or the same where there is none to be had and it has not its length.

        Raises:
            OSError: it has.
        """
        try:
            current = self._next_segment()
        except OSError:
            if full.size_bytes > SEGMENT_BYTES:
                raise
            return full
        self._current = current
        self._retire(full)
        return current

    def _retire(self, segment: Segment) -> None:
        if not segment.outstanding:
            segment.close()
            return
        stays = bool(self._full) or segment.size_bytes > SEGMENT_BYTES
        self._full.add(segment)
        self._full_bytes += segment.size_bytes
        if stays:
            segment.seal()

    def _next_segment(self) -> Segment:
        spare, self._spare = self._spare, None
        if spare is not None:
            try:
                spare.begin(self._next_path())
            except OSError:
                spare.close()
            else:
                self._unsynced_folder = True
                return spare
        return self._new_segment()

    def _next_path(self) -> Path:
        self._number += 1
        return self._folder / f"{self._process}-{self._number:06d}.journal"

    def _new_segment(self) -> Segment:
        if self._in_memory:
            return MemorySegment()
        while True:
            path = self._next_path()
            # A process that starts at this moment may take it for a dead one's, and remove it.
            with contextlib.suppress(BlockingIOError):
                segment = FileSegment(path)
                if path.exists():
                    self._unsynced_folder = True
                    return segment
                segment.close()


def _oldest_first(folder: Path) -> list[Path]:
    """The segments there: process by process, by the time at which the latest of its own was written, and within one in
    the order in which it wrote them, which the times do not tell where it was quick."""
    processes: dict[str, list[tuple[int, Path]]] = {}
    written_ns: dict[str, int] = {}
    for path in folder.glob("*.journal"):
        process, _, number = path.stem.rpartition("-")
        # A living process may rename or remove its own meanwhile.
        with contextlib.suppress(FileNotFoundError):
            written_ns[process] = max(written_ns.get(process, 0), path.stat().st_mtime_ns)
            processes.setdefault(process, []).append((int(number) if number.isdecimal() else 0, path))
    return [path for process in sorted(processes, key=written_ns.__getitem__) for _, path in sorted(processes[process])]
