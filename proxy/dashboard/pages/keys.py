"""The page of keys and costs: the rights and usage of each key, and the cost of judging. Never shows a key or its
hash."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import counts, trajectories
from whetstone.registry import api_key_store
from whetstone.registry.spending import read_spending

WINDOWS = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30), "all": None}
MOST_KEYS = 200


def keys(request: PageRequest) -> Mapping[str, Any]:
    """Load the project's keys, the newest first, with their usage; and the cost of judging by day, policy and task."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, "window")
    window, since = pagination.window(filters, WINDOWS, request.now)
    rows = api_key_store.keys(at, project)
    usage = {row["key_id"]: row for row in counts.usage(at, project, "key_id", since)}
    known = {row["key_id"] for row in rows}
    calls, cost = counts.judged(at, project, since)
    return {
        "keys": [{**row, "state": _state(row, request), "usage": usage.get(row["key_id"])} for row in rows[:MOST_KEYS]],
        "more_keys": max(0, len(rows) - MOST_KEYS),
        "keyless": usage.get(None),
        "gone": [row for name, row in usage.items() if name is not None and name not in known],
        "total": {
            name: sum(row[name] for row in usage.values())
            for name in ("completions", "prompt_tokens", "sampled_tokens")
        },
        "days": counts.judge_days(at, project, since),
        "cost": cost,
        "spent": _spent(request),
        "judge_calls": calls,
        "by_task": counts.judged_by_task(at, project, trajectories.policy_names(at, project)),
        "newest_judgements": counts.NEWEST_JUDGEMENTS,
        "by_day": counts.usage(at, project, "day", since)[-60:][::-1],
        "window": window,
        "since": since,
        "at": lambda **changed: pagination.href("/ui/keys", {**filters, **changed}),
    }


def _spent(request: PageRequest) -> dict[str, Any] | None:
    """Load what was spent today: in the home project, of all projects, as the cap counts it; elsewhere of the project
    itself. None where nothing is counted."""
    settings, spending = request.parts.settings, request.parts.spending
    if not spending.is_counted:
        return None
    spent = read_spending(request.connection, settings, request.now)
    is_home = request.project == settings.home
    usd, cap = spent.usd if is_home else spent.of_project(request.project), spending.usd_per_day
    return {
        "usd": usd,
        "cap": cap,
        "is_of_all": is_home and len(settings.all_projects) > 1,
        "is_reached": cap is not None and spent.usd >= cap,
        "parts": [(name, cost) for (owner, name), cost in sorted(spent.upstreams.items()) if owner == request.project],
    }


def _state(row: Mapping[str, Any], request: PageRequest) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expires_at"] is not None and row["expires_at"] <= request.now else "live"
