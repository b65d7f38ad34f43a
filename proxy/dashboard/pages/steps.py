"""The page of a step: its metrics among those of the steps before, and what it trained on."""

from typing import Any

from proxy.dashboard.interfaces import Action, Asked, Page
from proxy.dashboard.queries import steps
from proxy.dashboard.views import chart_data
from proxy.errors import BadRequest, NotFound

DRAWN = 60
"""Most steps in its charts; this step is the last one, or near it."""
AFTER = 10
"""Most of them that may be later steps."""
LISTED = 100
"""Trajectories per page."""
MEANINGS = {
    "reward_mean": "Mean reward over its trajectories",
    "loss": "What the update lowers; only its size over steps tells anything",
    "kl": "How far the policy is from the base model, nats a token (k3)",
    "entropy": "How open its choices are, nats a token",
    "mismatch_k3": "How far trainer and server disagree on the same tokens, nats a token",
    "grad_norm": "Length of the gradient, before clipping",
    "tokens_per_s": "Sampled tokens per second of the whole step",
    "seconds": "From claim to promotion",
}


def step(asked: Asked) -> dict[str, Any]:
    """Load one step."""
    policy, text = asked.path["policy"], asked.path["number"]
    told = (asked.connection, asked.project, policy)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
    row = None if number is None else steps.one(*told, number)
    if row is None or number is None:
        raise NotFound(f"there is no step {text[:50]!r} of a policy {policy[:200]!r} in this project")
    before, after = steps.neighbours(*told, number)
    drawn = steps.newest(*told, None, DRAWN, up_to=number + AFTER)[::-1]
    members = steps.members(asked.connection, asked.project, row["id"], _after(asked), LISTED + 1)
    last = members[LISTED - 1] if len(members) > LISTED else None
    return {
        "policy": policy,
        "step": row,
        "before": before,
        "after": after,
        "figures": [
            (column.name, MEANINGS[column.name], row[column.name], chart_data.figure(drawn, column.name, number))
            for column in steps.FIGURES
        ],
        "phases": sorted((row["phases"] or {}).items(), key=lambda phase: -phase[1]),
        "config": sorted((row["config"] or {}).items()),
        "members": members[:LISTED],
        "largest": max((abs(one.advantage) for one in members if one.advantage is not None), default=0.0),
        "next_members": None if last is None else f"{last.group_id} {last.trajectory_id}",
        "is_first": "after" not in asked.query,
    }


def _after(asked: Asked) -> tuple[str, str] | None:
    text = asked.query.get("after")
    if text is None:
        return None
    group_id, _, trajectory_id = text.partition(" ")
    if not trajectory_id:
        raise BadRequest("after must be a group's id and a trajectory's, as the page's own links have them")
    return group_id, trajectory_id


PAGES = (Page("/ui/policies/{policy}/steps/{number}", "step.html", step, "/ui/policies"),)
ACTIONS: tuple[Action, ...] = ()
