"""Lists are walked from the newest row on, in bounded time, and nothing is left out or told twice."""

from datetime import timedelta

import pytest
from sqlalchemy import Engine

from migrations import schema
from proxy.dashboard.queries import newest as store_newest
from proxy.dashboard.queries.newest import Place, RowPage, newest
from tests.conftest import Seed

ROWS = 90
t = schema.trajectories.c


@pytest.fixture
def walked(seed: Seed) -> Engine:
    """Rows three at a moment, every tenth of which is wanted."""
    for place in range(ROWS):
        created_at = seed.now + timedelta(seconds=place // 3)
        seed.trajectory(f"t{place:02}", turns=0, created_at=created_at, task="wanted" if place % 10 == 0 else None)
    return seed.engine


def pages(engine: Engine, *tasks: str, rows_at_once: int = 4, most_s: float = 60.0) -> list[RowPage]:
    """All pages of the list, the first first."""
    pages_read: list[RowPage] = []
    before: Place | None = None
    with engine.connect() as connection:
        while not pages_read or before is not None:
            wanted = [t.task == name for name in tasks]
            columns, within = [t.id, t.created_at], [t.project == "default"]
            page = newest(connection, schema.trajectories, columns, within, wanted, before, rows_at_once, most_s)
            assert len(page.rows) <= rows_at_once
            pages_read.append(page)
            before = page.older
    return pages_read


def ids(pages_read: list[RowPage]) -> list[str]:
    return [row["id"] for page in pages_read for row in page.rows]


def test_all_rows_come_once_the_newest_first(walked: Engine) -> None:
    assert ids(pages(walked)) == [f"t{place:02}" for place in range(ROWS - 1, -1, -1)]


def test_all_that_is_wanted_comes_once(walked: Engine) -> None:
    pages_read = pages(walked, "wanted")
    assert ids(pages_read) == [f"t{place:02}" for place in range(80, -1, -10)]
    assert not any(page.stopped for page in pages_read)


def test_a_walk_that_has_no_time_left_stops_and_goes_on_from_there(
    walked: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_newest, "FIRST_CHUNK", 7)
    pages_read = pages(walked, "wanted", most_s=0.0)
    assert ids(pages_read) == [f"t{place:02}" for place in range(80, -1, -10)]
    assert len(pages_read) > 9 and pages_read[0].stopped and pages_read[0].looked_at == 7
    assert not pages_read[-1].stopped


def test_what_is_not_there_is_looked_for_to_the_end(walked: Engine) -> None:
    (page,) = pages(walked, "nobody's")
    assert (page.rows, page.older, page.looked_at, page.stopped) == ([], None, ROWS, False)
