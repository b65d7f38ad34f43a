"""The page of live requests: recorded calls as they come, with filters in the URL; and the last day, hour by hour."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import traffic, trajectories
from proxy.dashboard.views.hours import hourly
from whetstone.calls.store import Filter, ended_since, newest
from whetstone.registry import api_key_store

PATH = "/ui/live"
FIELDS = ("policy", "version", "task", "state", "key", "min")
AFTER = "after"
"""Query parameter: milliseconds since 1970; only calls that ended since then are wanted, as `static/follow.js` asks."""
SETTLE_S = 1.0
"""How long before now a look ends: a call is recorded shortly after it ended, and the clocks of proxies differ."""
LISTED = 50
"""Most calls of one answer."""
STATES = ("complete", "aborted", "error")
MOST_KEYS = 200


def live(request: PageRequest) -> Mapping[str, Any]:
    """Load the newest calls and the last day; with `after` only the calls that ended since."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, *FIELDS)
    wanted, wrong = read_filter(project, filters)
    # Before the calls are read, so that none is missed by the next look.
    until_ms = math.floor(1000 * (min(request.now.timestamp(), request.parts.written_until()) - SETTLE_S))
    after = read_moment(request.query.get(AFTER))
    keys = api_key_store.keys(at, project)[:MOST_KEYS]
    values: dict[str, Any] = {
        "filters": filters,
        "wrong": wrong,
        "calls": [],
        "ended": 0,
        "until": until_ms,
        "key_names": {row["key_id"]: row["name"] for row in keys},
        "policies": trajectories.policy_names(at, project),
        "states": STATES,
        "day": None,
        "at": lambda **changed: pagination.href(PATH, {**filters, **changed}),
    }
    if wrong:
        return values
    if after is None:
        return {**values, "calls": newest(at, wanted, LISTED)[::-1], "day": _day(request, wanted)}
    new = ended_since(at, wanted, after, datetime.fromtimestamp(until_ms / 1000, UTC), LISTED)
    return {**values, "calls": new.rows[::-1], "ended": new.ended}


def read_filter(project: str, filters: Mapping[str, str]) -> tuple[Filter, dict[str, str]]:
    """Return the filter, and the errors of its fields: field -> message."""
    wrong: dict[str, str] = {}
    version = filters.get("version", "").removeprefix("v")
    if version and not (version.isascii() and version.isdigit() and len(version) < 10):
        wrong["version"] = "a version is a whole number: 3"
    if filters.get("state", STATES[0]) not in STATES:
        wrong["state"] = f"a state is one of {', '.join(STATES)}"
    try:
        least_s = float(filters["min"].replace(",", ".")) if "min" in filters else None
    except ValueError:
        least_s = math.nan
    if least_s is not None and not 0 <= least_s < math.inf:
        wrong["min"] = "a duration is a number of seconds: 2.5"
    if wrong:
        return Filter(project), wrong
    return Filter(
        project,
        policy=filters.get("policy"),
        status=filters.get("state"),
        task=filters.get("task"),
        version=int(version) if version else None,
        key_id=filters.get("key"),
        least_ms=None if least_s is None else 1000 * least_s,
    ), wrong


def read_moment(text: str | None) -> datetime | None:
    """Return a moment of the query; None if there is none or it cannot be read: then the newest calls are shown."""
    try:
        return datetime.fromtimestamp(max(0, int(text or "")) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _day(request: PageRequest, wanted: Filter) -> dict[str, Any]:
    """Load what the charts and tables of the last day show, for the filter's policy, version and key."""
    at, now = request.connection, request.now
    hours = traffic.hours_until(now)
    sums = {row["by"]: row for row in traffic.sums(at, wanted, "hour", hours[0])}
    times = traffic.sample(at, wanted, hours)
    return {
        **hourly(hours, sums, times),
        "by_policy": traffic.sums(at, wanted, "policy", hours[0]),
        "by_key": traffic.sums(at, wanted, "key_id", hours[0])[:MOST_KEYS],
        "sampled": traffic.EACH_HOUR,
    }
