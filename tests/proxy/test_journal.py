import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import journal as module
from proxy.journal import Journal, Segment


def frames(folder: Path) -> list[bytes]:
    """What the next start finds."""
    journal = Journal(folder)
    found = [record.read() for _, records in journal.left_behind() for record in records]
    journal.close()
    return found


def killed(folder: Path, *records: bytes) -> Path:
    """A journal whose process was killed after these records; its file."""
    journal = Journal(folder)
    for record in records:
        last = journal.append(record)
    journal.close()
    return last.segment.path


def test_what_sql_does_not_have_is_found_at_the_next_start(tmp_path: Path) -> None:
    killed(tmp_path, b"a", b"", b"b" * 100_000)
    assert frames(tmp_path) == [b"a", b"", b"b" * 100_000]


def test_it_is_found_until_sql_has_it(tmp_path: Path) -> None:
    killed(tmp_path, b"a", b"b")
    assert frames(tmp_path) == [b"a", b"b"]
    journal = Journal(tmp_path)
    for _, records in journal.left_behind():
        for record in records:
            journal.settled(record)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_settled_journal_leaves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.settled(journal.append(b"a"))
    journal.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", range(1, 8 + 5))
def test_a_torn_last_frame_is_dropped_and_those_before_it_stay(tmp_path: Path, cut: int) -> None:
    path = killed(tmp_path, b"first", b"torn!")
    path.write_bytes(path.read_bytes()[:-cut])
    assert frames(tmp_path) == [b"first"]


@given(st.lists(st.binary(max_size=50)), st.binary(max_size=60))
def test_no_rubbish_at_the_end_hides_or_invents_a_record(records: list[bytes], rubbish: bytes) -> None:
    data = b"".join(module._HEAD.pack(len(r), module.zlib.crc32(r)) + r for r in records)

    def payloads(data: bytes) -> list[bytes]:
        return [data[start : start + length] for start, length in module._frames(data)]

    assert payloads(data + rubbish)[: len(records)] == records
    assert payloads(data) == records


def test_a_frame_whose_bytes_changed_is_dropped(tmp_path: Path) -> None:
    path = killed(tmp_path, b"first", b"second")
    path.write_bytes(path.read_bytes().replace(b"second", b"sXcond"))
    assert frames(tmp_path) == [b"first"]


def test_the_segment_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    living = Journal(tmp_path)
    living.append(b"mine")
    assert frames(tmp_path) == []
    living.close()
    assert frames(tmp_path) == [b"mine"]


def test_the_oldest_segment_comes_first(tmp_path: Path) -> None:
    for age, record in ((30, b"old"), (10, b"new"), (20, b"middle")):
        then = time.time() - age
        os.utime(killed(tmp_path, record), (then, then))
    assert frames(tmp_path) == [b"old", b"middle", b"new"]


def test_a_full_segment_goes_as_soon_as_sql_has_all_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    large = b"x" * (module.SEGMENT_BYTES + 1)
    first = journal.append(large)
    second = journal.append(b"next")
    assert first.segment is not second.segment
    assert first.read() == large
    assert first.segment.path.exists()
    journal.settled(first)
    assert not first.segment.path.exists()
    journal.close()
    assert frames(tmp_path) == [b"next"]


FILL = """
import os, resource, signal, sys
from pathlib import Path
from proxy.journal import Journal

journal = Journal(Path(sys.argv[1]))
journal.append(b"before")
# No file may grow past this: the disk is full, half-way into the next frame.
resource.setrlimit(resource.RLIMIT_FSIZE, (journal._current.bytes + 20, resource.RLIM_INFINITY))
try:
    journal.append(b"x" * 100)
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(b"after")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_leaves_nothing_half_written_and_passes(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", FILL, str(tmp_path)], timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert frames(tmp_path) == [b"before", b"after"]


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Journal(tmp_path / "file" / "journal")


def test_two_cannot_have_one_segment(tmp_path: Path) -> None:
    segment = Segment(tmp_path / "a.journal")
    with pytest.raises(BlockingIOError):
        Segment(tmp_path / "a.journal")
    segment.close()
