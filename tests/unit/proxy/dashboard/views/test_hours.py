"""Traffic by the hour: percentiles as they are defined, a row for each hour, lines for the charts."""

from datetime import UTC, datetime

import pytest

from proxy.dashboard.queries.traffic import CallTimes, hours_until
from proxy.dashboard.views.hours import hourly, percentile

NOW = datetime(2026, 1, 2, 3, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([None], 0.5, None),
        ([3.0], 0.95, 3.0),
        ([4.0, 1.0, None, 3.0, 2.0], 0.5, 2.0),
        ([float(value) for value in range(1, 101)], 0.95, 95.0),
        ([float(value) for value in range(1, 101)], 0.5, 50.0),
        ([1.0, 2.0], 0.0, 1.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(
    values: list[float | None], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_a_day_has_every_hour_with_what_was_measured_in_it() -> None:
    hours = hours_until(NOW)
    assert (len(hours), hours[0].hour, hours[-1]) == (25, 3, NOW.replace(minute=0))
    total = {"calls": 3, "errors": 1, "prompt_tokens": 20, "sampled_tokens": 7}
    times = [CallTimes(24, 100.0, 1000.0), CallTimes(24, None, 3000.0)]
    day = hourly(hours, {"2026-01-02 03:00": total}, times)
    last, empty = day["rows"][-1], day["rows"][0]
    assert (last["calls"], last["total_p50"], last["total_p95"], last["ttft_p95"]) == (3, 1.0, 3.0, 0.1)
    assert (empty["calls"], empty["errors"], empty["total_p50"]) == (0, 0, None)
    calls = dict(day["charts"])["Calls"]
    assert calls["labels"][-1] == "03:00" and [line["name"] for line in calls["series"]] == ["calls", "errors"]
    assert calls["series"][0]["y"] == [0] * 24 + [3]
    assert dict(day["charts"])["Duration, seconds"]["series"][0]["y"] == [None] * 24 + [3.0]
