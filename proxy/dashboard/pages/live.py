"""The page of live requests: recorded calls as they come, with filters in the URL; and the last day, hour by hour."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import traffic, trajectories
from proxy.dashboard.views.hours import hourly
from whetstone.calls.store import Filter, NewCalls, ended_since, newest
from whetstone.registry import api_key_store

PATH = "/ui/live"
FIELDS = ("policy", "version", "task", "state", "key", "min")
AFTER = "after"
"""Query parameter: milliseconds since 1970; only calls that ended since then are wanted, as `static/follow.js` asks."""
LISTED = 50
"""Most calls of one answer."""
MARGIN = timedelta(seconds=1)
"""Overlap of two looks: the clocks of several proxies differ, and a call is written shortly after it ends."""
STATES = ("complete", "aborted", "error")
MOST_KEYS = 200


def live(request: PageRequest) -> Mapping[str, Any]:
    """Load the newest calls and the last day; with `after` only the calls that ended since."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, *FIELDS)
    wanted, wrong = read_filter(project, filters)
    # Before the calls are read, so that none is missed by the next look.
    until = min(request.now, datetime.fromtimestamp(request.parts.written_until(), UTC))
    after = read_moment(request.query.get(AFTER))
    keys = api_key_store.keys(at, project)[:MOST_KEYS]
    values: dict[str, Any] = {
        "filters": filters,
        "wrong": wrong,
        "calls": [],
        "unlisted": 0,
        "until": math.floor(until.timestamp() * 1000),
        "key_names": {row["key_id"]: row["name"] for row in keys},
        "policies": trajectories.policy_names(at, project),
        "states": STATES,
        "day": None,
        "at": lambda **changed: pagination.href(PATH, {**filters, **changed}),
    }
    if not wrong:
        new = (
            NewCalls(newest(at, wanted, LISTED), 0)
            if after is None
            else ended_since(at, wanted, after - MARGIN, LISTED)
        )
        values |= {"calls": new.rows[::-1], "unlisted": max(0, new.matching - len(new.rows))}
    return values if wrong or after is not None else {**values, "day": _day(request, wanted)}


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
        return datetime.fromtimestamp(int(text or "") / 1000, UTC)
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
