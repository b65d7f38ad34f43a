"""Ids: never twice, whoever draws them."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whetstone.domain.ids import ID, new_id

PROGRAMS = ("proxy", "judge", "trainer", "migrations", "whetstone")


def test_ids_are_ids_and_sort_by_time() -> None:
    drawn = [new_id() for _ in range(1000)]
    assert all(ID.fullmatch(one) and len(one) == 32 for one in drawn)
    assert len(set(drawn)) == 1000
    assert [one[:12] for one in drawn] == sorted(one[:12] for one in drawn)


def test_threads_never_draw_the_same() -> None:
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda _: [new_id()[12:] for _ in range(2000)], range(8)))
    assert len({one for some in drawn for one in some}) == 8 * 2000


def test_a_child_does_not_go_on_with_its_parents() -> None:
    new_id()  # more were drawn with it
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, "".join(new_id()[12:] for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 4000).decode()
    os.close(reader)
    os.close(writer)
    assert len(told) == 2000
    theirs = {told[start : start + 20] for start in range(0, 2000, 20)}
    assert not theirs & {new_id()[12:] for _ in range(256)}


def test_the_suffix_of_shadow_groups_and_the_pseudonym_of_a_user_are_written_once() -> None:
    """Three programs must agree on them, in rows that are there already."""
    root = Path(__file__).parents[4]
    files = [path for program in PROGRAMS for path in sorted((root / program).rglob("*.py"))]
    owners = {
        "whetstone/domain/ids.py": r"\.shadow[\"']",
        "whetstone/config/privacy.py": r"sha256\(.*\"utf-8\", \"replace\"\)",
    }
    for owner, pattern in owners.items():
        found = [str(path.relative_to(root)) for path in files if re.search(pattern, path.read_text(encoding="utf-8"))]
        assert found == [owner]
