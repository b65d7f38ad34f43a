"""The append-only journal between a served call and SQL. Bytes in, bytes out; knows nothing of what they mean.

A write to the page cache survives `kill -9` of the process. Each process appends to a segment of its own, locked while
it lives; the segments of the dead are read at the next start. A frame is length and CRC-32 (little endian, 4 bytes
each) and the payload; a torn last frame was never acknowledged and is dropped.
"""

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEGMENT_BYTES = 16 * 2**20
_HEAD = struct.Struct("<II")


class Segment:
    """One file of the journal, locked while it is open, and how many of its records SQL does not have yet."""

    def __init__(self, path: Path) -> None:
        """Open or make it.

        Raises:
            BlockingIOError: a living process has it.
            OSError: it cannot be opened.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise
        self.bytes = os.fstat(self._file).st_size
        self.outstanding = 0

    def append(self, payload: bytes) -> "Record":
        """Write one record, whole or not at all.

        Raises:
            OSError: it could not be written (no space left, mostly); the segment is as it was.
        """
        frame = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._file, frame)
            if written != len(frame):
                raise OSError(f"{self.path}: only {written} of {len(frame)} bytes were written")
        except OSError:
            os.ftruncate(self._file, self.bytes)
            raise
        record = Record(self, self.bytes + _HEAD.size, len(payload))
        self.bytes += len(frame)
        self.outstanding += 1
        return record

    def records(self) -> list["Record"]:
        """Every whole record in it; all of them count as outstanding from now on."""
        found = _frames(os.pread(self._file, self.bytes, 0))
        records = [Record(self, start, length) for start, length in found]
        self.outstanding = len(records)
        return records

    def read(self, start: int, length: int) -> bytes:
        """A record's payload. May be called from any thread.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        return os.pread(self._file, length, start)

    def close(self) -> None:
        """Close it; remove the file unless SQL still lacks something of it."""
        if not self.outstanding:
            self.path.unlink(missing_ok=True)
        os.close(self._file)


class Record(NamedTuple):
    """One record, by its place: what waits for SQL need not stay in memory."""

    segment: Segment
    start: int
    """Of its payload, in bytes."""
    length: int

    def read(self) -> bytes:
        """Its payload, from the file.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        return self.segment.read(self.start, self.length)


class Journal:
    """The folder's segments. Used from one thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._number = 0
        self._full: set[Segment] = set()
        self._current = self._new_segment()

    def append(self, payload: bytes) -> Record:
        """Write a record; hand it back to `settled` once SQL has it.

        Raises:
            OSError: nothing was written.
        """
        if self._current.bytes > SEGMENT_BYTES:
            full, self._current = self._current, self._new_segment()
            self._retire(full)
        return self._current.append(payload)

    def left_behind(self) -> Iterator[tuple[Segment, list[Record]]]:
        """The records of dead processes, segment by segment, oldest first; they are this journal's to settle now."""
        for path in sorted(self._folder.glob("*.journal"), key=lambda found: found.stat().st_mtime_ns):
            try:
                segment = Segment(path)
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
        if not segment.outstanding and segment in self._full:
            self._full.remove(segment)
            segment.close()

    def close(self) -> None:
        """Leave only what SQL does not have."""
        for segment in (self._current, *self._full):
            segment.close()

    def _retire(self, segment: Segment) -> None:
        if segment.outstanding:
            self._full.add(segment)
        else:
            segment.close()

    def _new_segment(self) -> Segment:
        while True:
            self._number += 1
            path = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}-{self._number:06d}.journal"
            # A process that starts at this moment may take it for a dead one's, and remove it.
            with contextlib.suppress(BlockingIOError):
                segment = Segment(path)
                if path.exists():
                    return segment
                segment.close()


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the payloads of whole frames begin, and how long they are; a damaged one hides none behind it."""
    start = 0
    while start + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        payload = data[start : start + length]
        if len(payload) != length:
            return
        if zlib.crc32(payload) == crc:
            yield start, length
        start += length
