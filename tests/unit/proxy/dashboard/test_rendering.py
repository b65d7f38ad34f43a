"""How the dashboard writes numbers and times: short, in line, and nothing is never zero."""

from datetime import UTC, datetime, timedelta

import pytest
from jinja2 import UndefinedError

from proxy.dashboard import rendering
from proxy.dashboard.error_page import ANONYMOUS

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"), (0, "0"), (0.0, "0"), (1, "1"), (0.5, "0.5"), (0.123456, "0.1235"), (-0.25, "−0.25"),
        (12345, "12,345"), (12345.678, "12,346"), (1.5e-7, "1.5e−7"), (100.0, "100"), (999.96, "1,000"),
        (float("nan"), "nan"), (0.00012, "0.00012"), (2e15, "2e15"),
    ],
)  # fmt: skip
def test_a_number_is_as_short_as_it_can_be(value: float | None, expected: str) -> None:
    assert rendering.number(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "–"), (0, "0"), (9999, "9,999"), (12_345, "12.3k"), (4_500_000, "4.5M"), (1e9, "1G")]
)
def test_a_count_tells_its_size(value: float | None, expected: str) -> None:
    assert rendering.short(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "–"), (0.34, "340 ms"), (12.5, "12.5 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_time_taken_has_its_unit(value: float | None, expected: str) -> None:
    assert rendering.seconds(value) == expected


@pytest.mark.parametrize(
    ("elapsed", "expected"),
    [
        (timedelta(0), "now"), (timedelta(seconds=59), "59 s ago"), (timedelta(minutes=3), "3 min ago"),
        (timedelta(hours=-2), "in 2 h"), (timedelta(days=40), "40 d ago"), (timedelta(days=800), "2 y ago"),
    ],
)  # fmt: skip
def test_a_moment_is_told_from_now(elapsed: timedelta, expected: str) -> None:
    assert rendering.ago(NOW - elapsed, NOW) == expected


def test_what_a_template_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        rendering.page("error.html", ANONYMOUS, "/ui", NOW, {})
