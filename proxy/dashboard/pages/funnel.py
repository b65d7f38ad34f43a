"""The page that shows why trajectories were not trained on: how far they get, and where the others drop out."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import counts as store_counts
from proxy.dashboard.queries import trajectories
from proxy.dashboard.views.funnel import CLAIMED, ONGOING, funnel

WINDOWS = {"day": timedelta(days=1), "week": timedelta(days=7), "all": None}
"""Name in the URL -> how far back."""


def why_not_trained(request: PageRequest) -> Mapping[str, Any]:
    """Load the funnel of one policy, or of all policies, over a time window."""
    filters = pagination.filters(request.query, "policy", "window")
    window, since = pagination.window(filters, WINDOWS, request.now)
    names = trajectories.policy_names(request.connection, request.project)
    chosen = [name for name in names if filters.get("policy") in (None, name)]
    counts = store_counts.reasons(request.connection, request.project, chosen, since)
    by_policy = {name: [(state, why, n) for of, state, why, n in counts if of == name] for name in chosen}

    def examples(reason: str) -> str:
        by = {"state": reason} if reason in (ONGOING, CLAIMED) else {"why": reason}
        begun = f"{since:%Y-%m-%dT%H:%M}" if since is not None else None
        return pagination.href("/ui/trajectories", {"policy": filters.get("policy"), **by, "since": begun})

    return {
        "stages": funnel((state, why, n) for _, state, why, n in counts),
        "each": {name: funnel(rows) for name, rows in by_policy.items() if rows},
        "since": since,
        "window": window,
        "filters": filters,
        "policies": names,
        "examples": examples,
        "at": lambda **changed: pagination.href("/ui/funnel", {**filters, **changed}),
    }
