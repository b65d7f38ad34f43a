"""The append-only journal between a served call and SQL: its segments, their size bound, and the records that wait in
them.

- A write to the page cache survives `kill -9` of the process. `to_sync` returns what a power loss would still destroy.
- Each process appends to its own segments. Segments of dead processes are read at the next start.
- A segment is removed when SQL has all its records. The current segment is cleared as soon as none of its records
  waits.
- While SQL keeps up, two small segments alternate: their memory is allocated already, and records that SQL has are soon
  overwritten.
"""

import asyncio
import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from proxy.recording.journal.segment import FileSegment, MemorySegment, Record, Segment

SEGMENT_BYTES = 8 * 2**20
"""Each segment is an open file as long as SQL lacks some of its records."""
ROTATE_BYTES = 2**20
"""Beyond this size another segment is used, if all earlier segments are empty."""
FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_EVERY_S = 1.0
"""How often a journal whose write failed is probed again."""


class Journal:
    """The segments of a folder. Used from one thread."""

    def __init__(self, folder: Path, max_bytes: float = math.inf, *, in_memory: bool = False) -> None:
        """Open a journal in a folder.

        `max_bytes`: bound for all segments; without it only the disk is the bound. `in_memory`: nothing more is written
        to the folder; the segments of dead processes are still read.

        Raises:
            OSError: the folder cannot be created or written, or its file system cannot reserve blocks or map files.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._in_memory = in_memory
        self._process = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._number = 0
        self._full: set[Segment] = set()
        self._spare: FileSegment | None = None
        """An empty segment, used after the current one."""
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
        """Return the size of the records, on the disk or in memory. The current file, and the one that alternates with
        it, have up to 2 MiB more."""
        return self._current.size_bytes + self._full_bytes

    @property
    def full(self) -> bool:
        """Return whether the next record would be refused, as far as is known: by the size bound, or by the disk."""
        if self._failed_at is not None and time.monotonic() - self._failed_at > PROBE_EVERY_S:
            try:
                self._current.probe()
                self._failed_at = None
            except OSError:
                self._failed_at = time.monotonic()
        return self._failed_at is not None or self._current.size_bytes + self._full_bytes >= self._max_bytes

    def append(self, payload: bytes | bytearray) -> Record:
        """Write a record; call `settled` once SQL has it.

        Raises:
            OSError: nothing was written.
        """
        current = self._current
        if current.size_bytes + self._full_bytes >= self._max_bytes:
            raise OSError(errno.EDQUOT, f"the journal has its {self._max_bytes} bytes")
        try:
            if current.size_bytes > ROTATE_BYTES and (not self._full or current.size_bytes > SEGMENT_BYTES):
                current = self._rotate(current)
            record = current.append(payload)
        except OSError:
            self._failed_at = time.monotonic()
            raise
        self._failed_at = None
        self._unsynced.add(current)
        return record

    def to_sync(self) -> list[int]:
        """Return descriptors of everything that is not on the disk yet, for `sync`."""
        lacking, self._unsynced = self._unsynced, set()
        descriptors = [one.descriptor() for one in lacking if one.outstanding and isinstance(one, FileSegment)]
        if self._unsynced_folder:
            descriptors.append(os.open(self._folder, os.O_RDONLY))
            self._unsynced_folder = False
        return descriptors

    def left_behind(self) -> Iterator[tuple[FileSegment, list[Record]]]:
        """Yield the records of dead processes, segment by segment, oldest first. This journal must settle them from now
        on."""
        for path in _oldest_first(self._folder):
            try:
                segment = FileSegment(path)
            except BlockingIOError:
                continue
            records = segment.records()
            self._retire(segment)
            if records:
                yield segment, records

    def acknowledge(self, segment: Segment, records: int = 1) -> None:
        """Note that SQL has this many more of a segment's records."""
        segment.outstanding -= records
        if segment.outstanding:
            return
        if segment in self._full:
            self._full.remove(segment)
            self._full_bytes -= segment.size_bytes
            self._unsynced.discard(segment)
            if self._spare is None and isinstance(segment, FileSegment) and segment.reusable():
                self._spare = segment
            else:
                segment.close()
        elif segment is self._current:
            segment.clear()

    def close(self) -> None:
        """Close all segments; only records that SQL does not have stay on the disk."""
        for segment in (self._current, *self._full, self._spare):
            if segment is not None:
                segment.close()

    def _rotate(self, full: Segment) -> Segment:
        """Return the segment to write to now: another one, or the same one if no other can be created and it is not
        full.

        Raises:
            OSError: it is full.
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
            # A process that starts at this moment may mistake it for a dead process's segment, and remove it.
            with contextlib.suppress(BlockingIOError):
                segment = FileSegment(path)
                if path.exists():
                    self._unsynced_folder = True
                    return segment
                segment.close()


class Flusher:
    """Syncs to the disk what was written, off the event loop. Callers that wait at the same time share one fsync. Used
    from one event loop."""

    def __init__(self, to_sync: Callable[[], list[int]], sync: Callable[[list[int]], None]) -> None:
        """Create a flusher. `to_sync` returns the descriptors that are not synced yet; `sync` syncs them, and blocks as
        long as the disk takes."""
        self._to_sync = to_sync
        self._sync = sync
        self._running: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Return when no sync is running any more."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def flushed(self) -> None:
        """Return when everything that was written before is on the disk.

        Raises:
            OSError: the disk fails; how much was written is unknown.
        """
        before = self._running
        if before is not None:
            # The running sync began before the latest writes: the next one covers them, and all who wait share it.
            await asyncio.wait([before])
        if self._running is before or self._running is None:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._sync, self._to_sync()))
        await asyncio.shield(self._running)


def _oldest_first(folder: Path) -> list[Path]:
    """Return the folder's segments: process by process, sorted by the time of the process's latest write; within a
    process by number, because the times are not precise enough."""
    processes: dict[str, list[tuple[int, Path]]] = {}
    written_ns: dict[str, int] = {}
    for path in folder.glob("*.journal"):
        process, _, number = path.stem.rpartition("-")
        # A living process may rename or remove its own segments meanwhile.
        with contextlib.suppress(FileNotFoundError):
            written_ns[process] = max(written_ns.get(process, 0), path.stat().st_mtime_ns)
            processes.setdefault(process, []).append((int(number) if number.isdecimal() else 0, path))
    return [path for process in sorted(processes, key=written_ns.__getitem__) for _, path in sorted(processes[process])]
