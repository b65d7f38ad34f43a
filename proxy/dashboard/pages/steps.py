"""The page of a step: its metrics among those of the steps before, and what it trained on."""

from typing import Any

from proxy.dashboard.interfaces import Action, Page, PageRequest
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
    "loss": "What the update lowers; only its change over the steps is meaningful",
    "kl": "How far the policy is from the base model, nats per token (k3)",
    "entropy": "How random the sampling is, nats per token",
    "mismatch_k3": "How far trainer and server disagree on the same tokens, nats per token",
    "grad_norm": "Norm of the gradient, before clipping",
    "tokens_per_s": "Sampled tokens per second of the whole step",
    "seconds": "From claim to promotion",
}


def step(request: PageRequest) -> dict[str, Any]:
    """Load one step."""
    policy, text = request.path["policy"], request.path["number"]
    key = (request.connection, request.project, policy)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
    row = None if number is None else steps.by_number(*key, number)
    if row is None or number is None:
        raise NotFound(f"there is no step {text[:50]!r} of a policy {policy[:200]!r} in this project")
    before, after = steps.neighbours(*key, number)
    drawn = steps.newest(*key, None, DRAWN, up_to=number + AFTER)[::-1]
    members = steps.members(request.connection, request.project, row["id"], _after(request), LISTED + 1)
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
        "is_first": "after" not in request.query,
    }


def _after(request: PageRequest) -> tuple[str, str] | None:
    text = request.query.get("after")
    if text is None:
        return None
    group_id, _, trajectory_id = text.partition(" ")
    if not trajectory_id:
        raise BadRequest("after must be the id of a group and the id of a trajectory, as in the links of this page")
    return group_id, trajectory_id


PAGES = (Page("/ui/policies/{policy}/steps/{number}", "step.html", step, "/ui/policies"),)
ACTIONS: tuple[Action, ...] = ()
