"""The page of keys and costs: the rights and usage of each key, and the cost of judging. Never shows a key or its
hash."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import Action, Page, PageRequest
from proxy.dashboard.queries import counts, trajectories
from whetstone.registry import api_key_store

WINDOWS = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30), "all": None}
MOST_KEYS = 200


def keys(request: PageRequest) -> Mapping[str, Any]:
    """Load the project's keys, the newest first, with their usage; and the cost of judging by day, policy and task."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, "window")
    window, since = pagination.window(filters, WINDOWS, request.now)
    rows = api_key_store.keys(at, project)
    usage = {row["key_id"]: row for row in counts.usage_by_key(at, project, since)}
    known = {row["key_id"] for row in rows}
    days = counts.judge_days(at, project, since)
    calls, cost = counts.judged(at, project, since)
    policies = trajectories.policy_names(at, project)
    return {
        "keys": [{**row, "state": _state(row, request), "usage": usage.get(row["key_id"])} for row in rows[:MOST_KEYS]],
        "more_keys": max(0, len(rows) - MOST_KEYS),
        "keyless": usage.get(None),
        "gone": [row for name, row in usage.items() if name is not None and name not in known],
        "total": {
            name: sum(row[name] for row in usage.values())
            for name in ("completions", "prompt_tokens", "sampled_tokens")
        },
        "days": days,
        "cost": cost,
        "judge_calls": calls,
        "by_task": counts.judged_by_task(at, project, policies),
        "newest_judgements": counts.NEWEST_JUDGEMENTS,
        "by_day": list(reversed(counts.usage_by_day(at, project, since)))[:60],
        "window": window,
        "since": since,
        "at": lambda **changed: pagination.href("/ui/keys", {**filters, **changed}),
    }


def _state(row: Mapping[str, Any], request: PageRequest) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expires_at"] is not None and row["expires_at"] <= request.now else "live"


PAGES = [Page("/ui/keys", "keys.html", keys, nav="/ui/keys")]
ACTIONS: list[Action] = []
