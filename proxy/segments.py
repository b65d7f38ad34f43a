"""The pieces of the journal: files, locked while they are open, or memory. Bytes in, bytes out, a frame a record.

A frame is length and CRC-32 (little endian, 4 bytes each) and the payload; a torn last frame was never acknowledged and
is dropped. Knows nothing of what records mean, nor of the segments beside it.
"""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

PROBE_BYTES = 64 * 2**10
_HEAD = struct.Struct("<II")


class Segment(Protocol):
    """One piece of the journal, and how many of its records SQL does not have yet."""

    size_bytes: int
    outstanding: int

    def append(self, payload: bytes) -> "Record":
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
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise
        self.size_bytes = os.fstat(self._file).st_size
        self.outstanding = 0

    def append(self, payload: bytes) -> "Record":
        self._write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        record = Record(self, self.size_bytes + _HEAD.size, len(payload))
        self.size_bytes += _HEAD.size + len(payload)
        self.outstanding += 1
        return record

    def records(self) -> list["Record"]:
        """Every whole record in it; all of them count as outstanding from now on."""
        found = _frames(os.pread(self._file, self.size_bytes, 0))
        records = [Record(self, start, length) for start, length in found]
        self.outstanding = len(records)
        return records

    def read(self, start: int, length: int) -> bytes:
        return os.pread(self._file, length, start)

    def probe(self) -> None:
        # No frame begins so: whoever dies in between leaves a torn one.
        self._write(b"\xff" * PROBE_BYTES)
        os.ftruncate(self._file, self.size_bytes)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)
        self.size_bytes = 0

    def descriptor(self) -> int | None:
        return os.dup(self._file)

    def close(self) -> None:
        if not self.outstanding:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written", str(self.path))
        except OSError:
            os.ftruncate(self._file, self.size_bytes)
            raise


class MemorySegment:
    """No file: what it holds ends with the process."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.outstanding = 0
        self._data = bytearray()

    def append(self, payload: bytes) -> "Record":
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

    def descriptor(self) -> int | None:
        return None

    def close(self) -> None:
        self._data = bytearray()


class Record(NamedTuple):
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
        start += _HEAD.size
        payload = data[start : start + length]
        if len(payload) != length:
            return
        if zlib.crc32(payload) == crc:
            yield start, length
        start += length
