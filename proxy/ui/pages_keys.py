"""The page of keys and costs: what each key may do and took, what judging cost. Never a key, nor its hash."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.ui import listed, store_counts, store_trajectories
from proxy.ui.page import Action, Asked, Page
from whetstone import store_keys

WINDOWS = {"day": timedelta(days=1), "week": timedelta(days=7), "month": timedelta(days=30), "all": None}
MOST_KEYS = 200


def keys(asked: Asked) -> Mapping[str, Any]:
    """The project's keys, the newest first, with what was asked with each; judging by day, policy and task."""
    at, project = asked.connection, asked.project
    kept = listed.filters(asked.query, "window")
    window = kept.get("window") if kept.get("window") in WINDOWS else "week"
    lasts = WINDOWS[str(window)]
    since = None if lasts is None else (asked.now - lasts).replace(minute=0, second=0, microsecond=0)
    rows = store_keys.keys(at, project)
    usage = {row["key_id"]: row for row in store_counts.usage_by_key(at, project, since)}
    known = {row["key_id"] for row in rows}
    days = store_counts.judge_days(at, project, since)
    calls, cost = store_counts.judged(at, project, since)
    policies = store_trajectories.policy_names(at, project)
    return {
        "keys": [{**row, "state": _state(row, asked), "usage": usage.get(row["key_id"])} for row in rows[:MOST_KEYS]],
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
        "by_task": store_counts.judged_by_task(at, project, policies),
        "newest_judgements": store_counts.NEWEST_JUDGEMENTS,
        "by_day": list(reversed(store_counts.usage_by_day(at, project, since)))[:60],
        "window": window,
        "windows": list(WINDOWS),
        "since": since,
        "at": lambda **changed: listed.href("/ui/keys", {**kept, **changed}),
    }


def _state(row: Mapping[str, Any], asked: Asked) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expires_at"] is not None and row["expires_at"] <= asked.now else "live"


PAGES = [Page("/ui/keys", "keys.html", keys, nav="/ui/keys")]
ACTIONS: list[Action] = []
