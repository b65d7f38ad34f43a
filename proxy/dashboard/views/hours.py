"""Lay out the traffic of a day by the hour, for charts and for the table beside them. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from proxy.dashboard.queries.traffic import CallTimes
from proxy.dashboard.views import chart_data


def percentile(values: Iterable[float | None], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without any value."""
    ordered = sorted(value for value in values if value is not None)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def hourly(
    hours: Sequence[datetime], sums: Mapping[str, Mapping[str, Any]], times: Sequence[CallTimes]
) -> dict[str, Any]:
    """Return the `rows` of the table, an hour each, and the `charts`: title and values. Times are in seconds."""
    by_hour: list[list[CallTimes]] = [[] for _ in hours]
    for one in times:
        by_hour[one.hour].append(one)
    rows = []
    for hour, of_hour in zip(hours, by_hour, strict=True):
        total = sums.get(f"{hour:%Y-%m-%d %H:00}", {})
        row: dict[str, Any] = {"hour": hour}
        row |= {name: total.get(name, 0) for name in ("calls", "errors", "prompt_tokens", "sampled_tokens")}
        for name in ("ttft_ms", "total_ms"):
            values = [getattr(one, name) for one in of_hour]
            for share in (50, 95):
                value_ms = percentile(values, share / 100)
                row[f"{name.removesuffix('_ms')}_p{share}"] = None if value_ms is None else value_ms / 1000
        rows.append(row)
    labels = [f"{hour:%H:%M}" for hour in hours]
    return {"rows": rows, "charts": [(title, _chart(labels, rows, series)) for title, series in CHARTS]}


Series = tuple[tuple[str, str, str], ...]
CHARTS: tuple[tuple[str, Series], ...] = (
    ("Calls", (("calls", "calls", "accent"), ("errors", "errors", "bad"))),
    ("Duration, seconds", (("total_p95", "p95", "accent"), ("total_p50", "p50", "info"))),
    ("Time to first token, seconds", (("ttft_p95", "p95", "accent"), ("ttft_p50", "p50", "info"))),
    ("Tokens", (("prompt_tokens", "read", "accent"), ("sampled_tokens", "sampled", "info"))),
)
"""Title of each chart, and its lines: column, name, colour."""


def _chart(labels: Sequence[str], rows: Sequence[Mapping[str, Any]], series: Series) -> dict[str, Any]:
    return chart_data.hours(labels, [(name, colour, [row[column] for row in rows]) for column, name, colour in series])
