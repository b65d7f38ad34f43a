"""The pieces of the journal: files, locked while they are open, or memory. Bytes in, bytes out, a frame a record.

A frame is length and CRC-32 (little endian, 4 bytes each) and the payload, and no payload is empty; zeros follow the
last. A torn last frame was never acknowledged and is dropped. Knows nothing of what records mean, nor of the segments
beside it.

A file is written by memory that is shared with the page cache: no system call, so no other thread gets the interpreter
meanwhile, and next to nothing waits for a disk that is busy with SQL. Its blocks are asked for before, in large steps,
where a full disk can still say so: of a page without a block the kernel says so with a signal that ends the process. So
it does on file systems that write to another block each time (btrfs, ZFS), which keep none back.
"""

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

PROBE_BYTES = 64 * 2**10
STEP_BYTES = 2**20
"""By so much a file grows, where a record needs no more."""
KEPT_BYTES = 2 * STEP_BYTES
"""What a file has of the disk and of memory once SQL has all of it; of one that grew further nothing is kept."""
_HEAD = struct.Struct("<II")
_write_head = _HEAD.pack_into
_ZEROS = memoryview(bytes(KEPT_BYTES))


class Segment(Protocol):
    """One piece of the journal, and how many of its records SQL does not have yet."""

    size_bytes: int
    outstanding: int

    def append(self, payload: bytes | bytearray) -> "Record":
        """Write one record, whole or not at all.

        Raises:
            OSError: it could not be written (no space left, mostly); the segment is as it was.
        """
        ...

    def read(self, start: int, length: int) -> bytes:
        """A record's payload. May be called from any thread.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        ...

    def probe(self) -> None:
        """Try whether there is room.

        Raises:
            OSError: there is none.
        """
        ...

    def clear(self) -> None:
        """Forget all records: SQL has them."""
        ...

    def spare(self) -> bool:
        """The same, of one that is to be written again from its beginning; whether that is better than a new one."""
        ...

    def begin(self, path: Path) -> None:
        """What was spare is written from now on, under that name: the next start goes by names.

        Raises:
            OSError: the folder takes no other name.
        """
        ...

    def seal(self) -> None:
        """Nothing more is written to it: it takes no more room than it needs."""
        ...

    def descriptor(self) -> int | None:
        """A descriptor by which it can be brought to the disk, for the caller to close; None: it has no disk."""
        ...

    def close(self) -> None:
        """Close it; nothing of it stays unless SQL still lacks something."""
        ...


class FileSegment:
    """One file, locked while it is open."""

    def __init__(self, path: Path) -> None:
        """Open or make it.

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
        """What is written to; None while nothing is."""
        self._room_bytes = 0

    def append(self, payload: bytes | bytearray) -> "Record":
        start, length = self.size_bytes + _HEAD.size, len(payload)
        end = start + length
        if end > self._room_bytes:
            self._grow(end)
        memory = self._memory
        assert memory is not None and length
        memory[start:end] = payload
        # The head last: whoever dies before that leaves zeros there, where reading ends.
        _write_head(memory, self.size_bytes, length, zlib.crc32(payload))
        self.size_bytes = end
        self.outstanding += 1
        return Record(self, start, length)

    def records(self) -> list["Record"]:
        """Every whole record in it; all of them count as outstanding from now on."""
        found = _frames(os.pread(self._file, self.size_bytes, 0))
        records = [Record(self, start, length) for start, length in found]
        self.size_bytes = records[-1].start + records[-1].length if records else 0
        self.outstanding = len(records)
        return records

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._file, length, start)

    def probe(self) -> None:
        self._grow(self._room_bytes + PROBE_BYTES)  # what it has already tells nothing of the disk

    def clear(self) -> None:
        if self._room_bytes > KEPT_BYTES:
            self.size_bytes = 0
            self.seal()
        elif self._memory is not None:
            self._memory[: self.size_bytes] = _ZEROS[: self.size_bytes]
            self.size_bytes = 0

    def spare(self) -> bool:
        # Its pages are there: of a new file the kernel has to make each.
        if self._memory is None or self._room_bytes > KEPT_BYTES:
            return False
        self.clear()
        return True

    def begin(self, path: Path) -> None:
        self.path.rename(path)
        self.path = path

    def descriptor(self) -> int | None:
        return os.dup(self._file)

    def seal(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory, self._room_bytes = None, 0
            os.ftruncate(self._file, self.size_bytes)

    def close(self) -> None:
        self.seal()
        if not self.outstanding:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _grow(self, least_bytes: int) -> None:
        """Have room for so much.

        Raises:
            OSError: the disk has not; it is as it was.
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
            with suppress(SystemError):  # macOS cannot: there another mapping of the file takes its place
                before.resize(room_bytes)
                return
        self._memory = mmap.mmap(self._file, room_bytes)
        if before is not None:
            before.close()


def _reserve(file: int, start: int, end: int) -> None:
    """Have the disk keep blocks for these bytes; what is written there stays.

    Raises:
        OSError: it has not so many.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, end - start)
        return
    # macOS: zeros that are written get blocks.
    at = max(start, os.fstat(file).st_size)
    while at < end:
        at += os.pwrite(file, _ZEROS[: end - at], at)


class MemorySegment:
    """No file: what it holds ends with the process."""

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

    def spare(self) -> bool:
        return False

    def begin(self, path: Path) -> None:
        pass

    def seal(self) -> None:
        pass

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        self._data = bytearray()


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record, by its place: what waits for SQL need not stay in memory."""

    segment: Segment
    start: int
    """Of its payload, in bytes."""
    length: int

    def read(self) -> bytes:
        """Its payload, from the segment.

        Raises:
            OSError: the segment is closed, or its disk fails.
        """
        return self.segment.read(self.start, self.length)


def sync(descriptors: list[int]) -> None:
    """Bring them to the disk and close them. Takes as long as the disk does: for a thread.

    Raises:
        OSError: the disk fails; what is on it is not known.
    """
    try:
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _frames(data: bytes) -> Iterator[tuple[int, int]]:
    """Where the payloads of whole frames begin, and how long they are; a damaged one hides none behind it."""
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
