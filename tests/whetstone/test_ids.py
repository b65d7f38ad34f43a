"""Ids: never twice, whoever draws them."""

import os
from concurrent.futures import ThreadPoolExecutor

from whetstone.ids import ID, new_id


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
