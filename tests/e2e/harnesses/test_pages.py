"""`make pages` in its short form, and that it can fail: kinds of addresses, percentiles, what counts as too slow."""

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.scale.pages import MOST_MS, PageTimes, filled_in, kind_of, patterns_of, percentile, prove, too_slow
from proxy.dashboard.pages.registry import PAGES

PATHS = patterns_of(["/ui/groups", "/ui/groups/{group_id}", "/ui/groups/newest"])


@pytest.mark.slow
def test_every_page_answers_in_time_under_load(tmp_path: Path) -> None:
    _, loaded, rate, faults = asyncio.run(prove(tmp_path, None, 2, count=3, seed=0, console=Console(quiet=True)))
    # Times beside other tests mean nothing; wrong answers and pages that were not requested do.
    assert [fault for fault in faults if " ms " not in fault] == []
    assert {page.path for page in PAGES} <= {kind.partition("?")[0] for kind in loaded.took_ms}
    assert rate > 0


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/ui/groups", "/ui/groups"),
        ("/ui/groups?state=open&before=1~g&policy=", "/ui/groups?before&state"),
        ("/ui/groups/g%2F1", "/ui/groups/{group_id}"),
        ("/ui/groups/newest", "/ui/groups/newest"),
        ("/ui/groups/g/1", None),
    ],
)
def test_addresses_of_a_kind_differ_in_values_alone(address: str, kind: str | None) -> None:
    assert kind_of(address, PATHS) == kind


def test_a_path_is_requested_for_each_thing() -> None:
    things = {"policy": ["p"], "number": ["1", "2"]}
    assert filled_in("/ui/policies/{policy}/steps/{number}", things) == [
        "/ui/policies/p/steps/1",
        "/ui/policies/p/steps/2",
    ]


def test_of_a_few_the_slowest_counts() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(value) for value in range(1000)], 0.99) == 990.0


def test_a_slow_page_and_one_that_fails_are_faults() -> None:
    times = PageTimes()
    times.note("/ui/groups", "/ui/groups", 200, MOST_MS + 1, "")
    times.note("/ui/keys", "/ui/keys", 200, MOST_MS - 1, "")
    times.note("/ui/funnel", "/ui/funnel", 500, 1.0, "a fault of ours")
    assert too_slow(times, "alone") == ["/ui/groups takes 301 ms alone: /ui/groups"]
    assert times.faults == ["/ui/funnel: 500 a fault of ours"]
