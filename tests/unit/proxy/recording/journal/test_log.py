import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.recording.journal import log as module
from proxy.recording.journal import segment as segments
from proxy.recording.journal.log import Journal
from proxy.recording.journal.segment import FileSegment, sync


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
    killed(tmp_path, b"a", b"b" * 100_000, b"c" * 3 * segments.STEP_BYTES, b"d")
    assert frames(tmp_path) == [b"a", b"b" * 100_000, b"c" * 3 * segments.STEP_BYTES, b"d"]


def test_it_is_found_until_sql_has_it(tmp_path: Path) -> None:
    killed(tmp_path, b"a", b"b")
    assert frames(tmp_path) == [b"a", b"b"]
    journal = Journal(tmp_path)
    for _, records in journal.left_behind():
        for record in records:
            journal.acknowledge(record.segment)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_settled_journal_leaves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.acknowledge(journal.append(b"a").segment)
    journal.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", range(1, 8 + 5))
def test_a_torn_last_frame_is_dropped_and_those_before_it_stay(tmp_path: Path, cut: int) -> None:
    path = killed(tmp_path, b"first", b"torn!")
    path.write_bytes(path.read_bytes()[:-cut])
    assert frames(tmp_path) == [b"first"]


DYING = """
import os, signal, sys
from pathlib import Path
from proxy.recording.journal.log import Journal

journal = Journal(Path(sys.argv[1]))
for number in range(2000):
    journal.append(b"%d" % number * 300)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_whoever_is_killed_leaves_every_record_and_nothing_behind_the_last(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert frames(tmp_path) == [b"%d" % number * 300 for number in range(2000)]


def test_a_record_whose_head_was_not_written_yet_is_none(tmp_path: Path) -> None:
    path = killed(tmp_path, b"first")
    path.write_bytes(path.read_bytes() + bytes(segments._HEAD.size) + b"second" + bytes(1000))
    assert frames(tmp_path) == [b"first"]


@given(st.lists(st.binary(min_size=1, max_size=50)), st.binary(max_size=60))
def test_no_rubbish_at_the_end_hides_or_invents_a_record(records: list[bytes], rubbish: bytes) -> None:
    data = b"".join(segments._HEAD.pack(len(r), segments.zlib.crc32(r)) + r for r in records)

    def payloads(data: bytes) -> list[bytes]:
        return [data[start : start + length] for start, length in segments._frames(data)]

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
    journal.acknowledge(first.segment)
    assert not first.segment.path.exists()
    journal.close()
    assert frames(tmp_path) == [b"next"]


TURNS = """
import os, signal, sys
from pathlib import Path
from proxy.recording.journal.log import ROTATE_BYTES, Journal

journal, size, waiting = Journal(Path(sys.argv[1])), 2000, []
for number in range(20 * ROTATE_BYTES // size):
    waiting.append(journal.append(b"%06d" % number * (size // 6)))
    # SQL is always some calls behind, so that no segment is ever without one that waits.
    if len(waiting) == 200:
        for record in waiting[:100]:
            journal.acknowledge(record.segment)
        del waiting[:100]
    assert len(list(Path(sys.argv[1]).iterdir())) <= 2
print(len(waiting), number, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_segments_take_turns_and_leave_what_waits_in_the_order_it_came(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", TURNS, str(tmp_path)], timeout=60, capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    waiting, last = map(int, process.stdout.split())
    found = [int(frame[:6]) for frame in frames(tmp_path)]
    assert found == list(range(found[0], last + 1))
    assert waiting <= len(found) <= waiting + 2 * module.ROTATE_BYTES // 2000


def test_what_sql_has_is_gone_from_a_segment_that_waits_for_its_turn(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = [journal.append(b"secret" * 1000) for _ in range(module.ROTATE_BYTES // 6000 + 1)]
    second = journal.append(b"next")
    assert first[0].segment is not second.segment
    journal.acknowledge(first[0].segment, len(first))
    assert not any(first[0].segment.path.read_bytes())
    assert journal.size_bytes == second.segment.size_bytes
    journal.close()
    assert frames(tmp_path) == [b"next"]


def test_while_sql_takes_nothing_segments_are_large_and_few(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    while journal.size_bytes < 5 * module.SEGMENT_BYTES:
        journal.append(b"x" * 2**17)
    assert len(list(tmp_path.iterdir())) == 6
    journal.close()


def test_what_takes_turns_is_gone_when_it_is_closed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = journal.append(b"x" * (module.ROTATE_BYTES + 1))
    second = journal.append(b"y")
    journal.acknowledge(first.segment)
    journal.acknowledge(second.segment)
    assert len(list(tmp_path.iterdir())) == 2
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_segments_come_in_the_order_of_their_process_whatever_their_times_say(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    records = [journal.append(b"%d" % number * (module.SEGMENT_BYTES + 1)) for number in range(3)]
    journal.close()
    for age, record in enumerate(records):
        then = time.time() - age
        os.utime(record.segment.path, (then, then))
    assert [frame[:1] for frame in frames(tmp_path)] == [b"0", b"1", b"2"]


FILL = """
import os, resource, signal, sys
from pathlib import Path
from proxy.recording.journal.log import Journal
from proxy.recording.journal.segment import STEP_BYTES

journal = Journal(Path(sys.argv[1]))
journal.append(b"before")
# No file may grow past this: the disk is full, half-way into the next frame.
resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES + STEP_BYTES // 2, resource.RLIM_INFINITY))
try:
    journal.append(b"x" * STEP_BYTES)
except OSError:
    journal.append(b"meanwhile")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(b"after")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_leaves_nothing_half_written_and_passes(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", FILL, str(tmp_path)], timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert frames(tmp_path) == [b"before", b"meanwhile", b"after"]


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Journal(tmp_path / "file" / "journal")


def test_two_cannot_have_one_segment(tmp_path: Path) -> None:
    segment = FileSegment(tmp_path / "a.journal")
    with pytest.raises(BlockingIOError):
        FileSegment(tmp_path / "a.journal")
    segment.close()


# --- its bound, and what its disk says


def test_what_sql_has_is_gone_from_the_disk_as_soon_as_nothing_waits(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first, second = journal.append(b"first"), journal.append(b"second")
    (path,) = tmp_path.iterdir()
    journal.acknowledge(second.segment)
    assert b"first" in path.read_bytes()
    journal.acknowledge(first.segment)
    assert (path.read_bytes().strip(b"\0"), journal.size_bytes) == (b"", 0)
    journal.append(b"third")
    journal.close()
    assert frames(tmp_path) == [b"third"]


def test_it_takes_no_more_than_its_bound_and_more_again_when_sql_has_some(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_bytes=100)
    assert not journal.full
    records_left = [journal.append(b"x" * 60) for _ in range(2)]
    assert journal.full and journal.size_bytes > 100
    with pytest.raises(OSError, match="100 bytes"):
        journal.append(b"")
    for record in records_left:
        journal.acknowledge(record.segment)
    assert not journal.full
    journal.append(b"y")
    journal.close()
    assert frames(tmp_path) == [b"y"]


def test_what_the_dead_left_counts_too(tmp_path: Path) -> None:
    killed(tmp_path, b"x" * 200)
    journal = Journal(tmp_path, max_bytes=100)
    ((_, (record,)),) = journal.left_behind()
    assert journal.full
    journal.acknowledge(record.segment)
    assert not journal.full
    journal.close()


PROBED = """
import os, resource, signal, sys
from pathlib import Path
from proxy.recording.journal import log as module
from proxy.recording.journal.segment import STEP_BYTES

module.PROBE_EVERY_S = 0.0
journal = module.Journal(Path(sys.argv[1]))
journal.append(b"before" * (STEP_BYTES // 6 - 2))
resource.setrlimit(resource.RLIMIT_FSIZE, (STEP_BYTES, resource.RLIM_INFINITY))
assert not journal.full, "nobody has tried"
try:
    journal.append(b"x" * 100)
except OSError:
    assert journal.full and journal.full
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not journal.full, "there is room again"
    journal.append(b"after")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_disk_that_was_full_is_asked_again_before_anything_is_refused_for_it(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", PROBED, str(tmp_path)], timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert [record[-6:] for record in frames(tmp_path)] == [b"before", b"after"]


def test_a_folder_that_maps_no_files_says_so_before_anything_is_recorded(tmp_path: Path) -> None:
    code = """
import errno, mmap, sys
from pathlib import Path
from proxy.recording.journal.log import Journal

def no_map(*_):
    raise OSError(errno.ENODEV, "no map")

mmap.mmap = no_map
try:
    Journal(Path(sys.argv[1]))
except OSError as error:
    sys.exit(0 if error.errno == errno.ENODEV else 1)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=30).returncode == 0


def test_a_system_without_fallocate_and_mremap_keeps_every_record(tmp_path: Path) -> None:
    """As macOS: files are opened again with records in them, and grow past their first mapping."""
    program = """
import mmap, os, sys
from pathlib import Path
from proxy.recording.journal.segment import STEP_BYTES, FileSegment

class Fixed(mmap.mmap):
    def resize(self, newsize):
        raise SystemError("mmap: resizing not available--no mremap()")

del os.posix_fallocate
mmap.mmap = Fixed
path, wrote = Path(sys.argv[1]) / "s.journal", []
for _ in range(2):
    segment = FileSegment(path)
    assert [segment.read(one.start, one.length) for one in segment.records()] == wrote
    for size in (10, STEP_BYTES // 2, STEP_BYTES, 3 * STEP_BYTES):
        wrote.append(bytes([65 + len(wrote)]) * size)
        segment.append(wrote[-1])
    segment.close()
segment = FileSegment(path)
assert [segment.read(one.start, one.length) for one in segment.records()] == wrote
print("whole")
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "whole\n", done.stderr


def test_what_a_killed_process_left_takes_what_its_records_do(tmp_path: Path) -> None:
    path = killed(tmp_path, b"x" * 92)
    path.write_bytes(path.read_bytes() + bytes(segments.STEP_BYTES))
    journal = Journal(tmp_path)
    ((segment, _),) = journal.left_behind()
    assert (segment.size_bytes, journal.size_bytes) == (100, 100)
    journal.close()


def test_what_grew_large_takes_nothing_once_sql_has_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.acknowledge(journal.append(b"x" * (segments.REUSE_BYTES + 1)).segment)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 0
    journal.append(b"next")
    journal.close()
    assert frames(tmp_path) == [b"next"]


def test_a_full_segment_takes_no_more_than_its_records(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = journal.append(b"x" * (module.SEGMENT_BYTES + 1))
    journal.append(b"next")
    assert first.segment.path.stat().st_size == first.segment.size_bytes
    journal.close()


# --- what is on the disk, and what is in memory


def test_what_is_to_be_synced_is_given_once_and_not_once_sql_has_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    sync(journal.to_sync())  # its folder, with the file in it
    assert journal.to_sync() == []
    journal.append(b"a")
    given = journal.to_sync()
    assert len(given) == 1
    assert os.path.sameopenfile(given[0], journal._current._file)
    sync(given)
    assert journal.to_sync() == []
    with pytest.raises(OSError):
        os.fstat(given[0])
    journal.acknowledge(journal.append(b"b").segment)
    written = journal.to_sync()
    assert len(written) == 1, "the first one waits still"
    sync(written)
    journal.close()


def test_a_segment_that_is_full_is_synced_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(b"x" * (module.SEGMENT_BYTES + 1))
    journal.append(b"next")
    given = journal.to_sync()
    assert len(given) == 3, "both, and the folder"
    sync(given)
    journal.close()


def test_in_memory_there_is_no_file_and_records_are_read_all_the_same(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_bytes=10, in_memory=True)
    records = [journal.append(payload) for payload in (b"first", b"second")]
    assert [record.read() for record in records] == [b"first", b"second"]
    assert list(tmp_path.iterdir()) == [] and journal.to_sync() == []
    assert journal.full
    for record in records:
        journal.acknowledge(record.segment)
    assert (journal.size_bytes, journal.full) == (0, False)
    assert journal.append(b"third").read() == b"third"
    journal.close()


def turned(journal: Journal) -> FileSegment:
    """Have another segment be written; give the one before."""
    last = journal.append(b"x" * module.ROTATE_BYTES)
    journal.append(b"y")
    assert isinstance(last.segment, FileSegment)
    return last.segment


def test_a_segment_that_is_written_again_has_its_folder_synced(tmp_path: Path) -> None:
    """Its name is another one."""
    journal = Journal(tmp_path)
    journal.acknowledge(turned(journal))
    sync(journal.to_sync())
    turned(journal)
    descriptors = journal.to_sync()
    assert str(tmp_path) in [str(Path(f"/proc/self/fd/{one}").readlink()) for one in descriptors]
    sync(descriptors)
    journal.close()


def test_of_several_empty_segments_one_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    full = [turned(journal)]
    while len(full) < 3:
        record = journal.append(b"x" * module.SEGMENT_BYTES)
        if record.segment not in full:
            full.append(record.segment)  # type: ignore[arg-type]
    for segment in full:
        if segment is not journal._current:
            journal.acknowledge(segment, segment.outstanding)
    assert len(list(tmp_path.iterdir())) == 2
    journal.close()


def test_a_turn_that_cannot_be_taken_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder takes no other name and no other file; the one that is written has room."""
    journal = Journal(tmp_path)
    journal.acknowledge(turned(journal))

    def refused(*_: object) -> None:
        raise OSError("no")

    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused)
        patched.setattr(module, "FileSegment", refused)
        for _ in range(3):
            journal.append(b"z" * module.ROTATE_BYTES)
        with pytest.raises(OSError, match="no"):
            while True:
                journal.append(b"z" * module.ROTATE_BYTES)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_files, "the one that could not be taken is given back"
    journal.append(b"after")
    journal.close()
    assert frames(tmp_path)[-1] == b"after"
