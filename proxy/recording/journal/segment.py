"""The segments of the journal: files that are locked while they are open, or memory. One frame holds one record.

A frame is length and CRC-32 (little endian, 4 bytes each) and the payload; no payload is empty, and zeros follow the
last frame. A torn last frame was never acknowledged and is dropped.

A file is written through memory that is shared with the page cache. This needs no system call, so no other thread gets
the interpreter meanwhile, and almost nothing waits for a disk that is busy with SQL. Blocks are reserved in advance, in
large steps, because a full disk can report an error only then: for a page without a block the kernel ends the process
by a signal. The same happens on file systems that write to another block each time (btrfs, ZFS), because they reserve
none.
"""

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

PROBE_BYTES = 64 * 2**10
STEP_BYTES = 2**20
"""A file grows by this much, unless a record needs more."""
REUSE_BYTES = 2 * STEP_BYTES
"""Disk and memory that a file keeps once SQL has all its records; a file that grew larger keeps none."""
_HEAD = struct.Struct("<II")
_write_head = _HEAD.pack_into
_ZEROS = memoryview(bytes(REUSE_BYTES))


class FileSegment:
    """One segment of the journal, and the number of its records that SQL does not have yet: a file, locked while it is
    open."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            BlockingIOError: a living process has it.
            OSError: it cannot be opened.
        """
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise
        self.size_bytes = os.fstat(self._file).st_size
        self.outstanding = 0
        self._memory: mmap.mmap | None = None
        """The mapped file; None while nothing is written."""
        self._room_bytes = 0

    def append(self, payload: bytes | bytearray) -> "Record":
        """Write one record, whole or not at all.

        Raises:
            OSError: it could not be written (mostly: no space left); the segment is unchanged.
        """
        start, length = self.size_bytes + _HEAD.size, len(payload)
        end = start + length
        if end > self._room_bytes:
            self._grow(end)
        memory = self._memory
        assert memory is not None and length
        memory[start:end] = payload
        # Write the head last: if the process dies before, zeros are left there, and reading ends at zeros.
        _write_head(memory, self.size_bytes, length, zlib.crc32(payload))
        self.size_bytes = end
        self.outstanding += 1
        return Record(self, start, length)

    def records(self) -> list["Record"]:
        """Return every whole record in the file; all of them count as outstanding from now on."""
        frames = _frames(os.pread(self._file, self.size_bytes, 0))
        records = [Record(self, start, length) for start, length in frames]
        self.size_bytes = records[-1].start + records[-1].length if records else 0
        self.outstanding = len(records)
        return records

    def read(self, start: int, length: int) -> bytes:
        """Return a record's payload. May be called from any thread.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        return os.pread(self._file, length, start)

    def probe(self) -> None:
        """Check whether there is room.

        Raises:
            OSError: there is none.
        """
        self._grow(self._room_bytes + PROBE_BYTES)  # room that is reserved already proves nothing about the disk

    def clear(self) -> None:
        """Drop all records: SQL has them."""
        if self._room_bytes > REUSE_BYTES:
            self.size_bytes = 0
            self.seal()
        elif self._memory is not None:
            self._memory[: self.size_bytes] = _ZEROS[: self.size_bytes]
            self.size_bytes = 0

    def reusable(self) -> bool:
        """Clear a segment so that it can be written again from its beginning. Return whether that is better than a new
        segment."""
        # Its pages exist; for a new file the kernel has to create each page.
        if self._memory is None or self._room_bytes > REUSE_BYTES:
            return False
        self.clear()
        return True

    def begin(self, path: Path) -> None:
        """Begin to write to a spare segment under this name: the next start sorts by names.

        Raises:
            OSError: the folder does not accept the name.
        """
        self.path.rename(path)
        self.path = path

    def descriptor(self) -> int:
        """Return a descriptor for fsync, which the caller must close."""
        return os.dup(self._file)

    def seal(self) -> None:
        """Shrink the segment to the size of its records: nothing more is written to it."""
        if self._memory is not None:
            self._memory.close()
            self._memory, self._room_bytes = None, 0
            os.ftruncate(self._file, self.size_bytes)

    def close(self) -> None:
        """Close it; it is removed unless SQL still lacks some of its records."""
        self.seal()
        if not self.outstanding:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _grow(self, least_bytes: int) -> None:
        """Make room for `least_bytes`.

        Raises:
            OSError: the disk has no space; the segment is unchanged.
        """
        room_bytes = -(-least_bytes // STEP_BYTES) * STEP_BYTES
        try:
            _reserve(self._file, self._room_bytes, room_bytes)
            self._map(room_bytes)
        except OSError:
            os.ftruncate(self._file, self._room_bytes)
            raise
        self._room_bytes = room_bytes

    def _map(self, room_bytes: int) -> None:
        before = self._memory
        if before is not None:
            with suppress(SystemError):  # macOS cannot resize: a new mapping of the file takes its place
                before.resize(room_bytes)
                return
        self._memory = mmap.mmap(self._file, room_bytes)
        if before is not None:
            before.close()


def _reserve(file: int, start: int, end: int) -> None:
    """Reserve disk blocks for these bytes; data already written there stays.

    Raises:
        OSError: there is not enough space.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, end - start)
        return
    # macOS: written zeros get blocks.
    at = max(start, os.fstat(file).st_size)
    while at < end:
        at += os.pwrite(file, _ZEROS[: end - at], at)


class MemorySegment:
    """A segment in memory; its records end with the process."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.outstanding = 0
        self._data = bytearray()

    def append(self, payload: bytes | bytearray) -> "Record":
        record = Record(self, self.size_bytes, len(payload))
        self._data += payload
        self.size_bytes += len(payload)
        self.outstanding += 1
        return record

    def read(self, start: int, length: int) -> bytes:
        return bytes(self._data[start : start + length])

    def probe(self) -> None:
        pass

    def clear(self) -> None:
        self._data, self.size_bytes = bytearray(), 0

    def seal(self) -> None:
        pass

    close = clear


Segment = FileSegment | MemorySegment


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record, by its place in a segment: a record that waits for SQL need not stay in memory."""

    segment: Segment
    start: int
    """Offset of its payload, in bytes."""
    length: int

    def read(self) -> bytes:
        """Return its payload, read from the segment.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        return self.segment.read(self.start, self.length)


def sync(descriptors: list[int]) -> None:
    """Sync these descriptors to the disk and close them. Blocks as long as the disk takes: run it in a thread.

    Raises:
        OSError: the disk fails; how much was written is unknown.
    """
    try:
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the payload of each whole frame; a damaged frame does not hide the frames after it."""
    start = 0
    while start + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, start)
        if not length:
            return
        start += _HEAD.size
        payload = data[start : start + length]
        if len(payload) != length:
            return
        if zlib.crc32(payload) == crc:
            yield start, length
        start += length
