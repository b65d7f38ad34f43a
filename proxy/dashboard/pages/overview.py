"""The overview on the home page: the traffic of the last 24 hours, and the newest calls."""

from datetime import timedelta
from typing import Any

from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import traffic
from proxy.dashboard.views.hours import percentile
from whetstone.calls.store import Filter, newest

NEWEST = 8
"""Calls that are listed."""
TIMED = 1000
"""Newest calls that the percentiles are taken over."""


def overview(request: PageRequest) -> dict[str, Any] | None:
    """Load the overview; None while no call is recorded."""
    at, everything = request.connection, Filter(request.project)
    calls = newest(at, everything, NEWEST)
    if not calls:
        return None
    since = (request.now - timedelta(days=1)).replace(minute=0, second=0, microsecond=0)
    by_policy = traffic.sums(at, everything, "policy", since)
    times = traffic.newest_times(at, request.project, since, TIMED)
    return {
        "calls": calls[::-1],
        "sums": {
            name: sum(row[name] for row in by_policy)
            for name in ("calls", "errors", "aborted", "prompt_tokens", "sampled_tokens")
        },
        "timed": len(times),
        "total_ms": {share: percentile((one.total_ms for one in times), share / 100) for share in (50, 95)},
        "ttft_ms": {share: percentile((one.ttft_ms for one in times), share / 100) for share in (50, 95)},
        "rewarded": traffic.rewarded(at, request.project, since),
    }
