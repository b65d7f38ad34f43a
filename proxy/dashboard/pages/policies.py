"""The pages of policies: all policies, live; one policy with its versions, decisions and steps, and the actions on it;
one step, with its metrics among those of the steps around it, and what it trained on."""

from collections.abc import Mapping
from typing import Any

from proxy.api.admin import store
from proxy.api.admin.policies import known
from proxy.dashboard.interfaces import ActionResult, FormRequest, PageRequest
from proxy.dashboard.pages import first_run
from proxy.dashboard.pages.overview import overview
from proxy.dashboard.queries import policies as store_policies
from proxy.dashboard.views import chart_data, version_rewards
from proxy.errors import BadRequest, NotFound, StepRefused
from whetstone.domain.stats import FEWEST_REWARDS
from whetstone.registry import reward_store, version_store
from whetstone.registry.handover import read_handover, read_last_decision, read_saved

DRAWN = 400
"""Most versions in a curve, the newest."""
LISTED = 25
"""Versions per page, and steps per page."""
FIGURED = 120
"""Most steps in the small charts of a policy."""
RECENT_H = 24
MOST_REASON = 500
STATES = {"training": "trains from now on", "recording": "is only recorded from now on", "paused": "is paused"}
STEPS_DRAWN = 60
"""Most steps in the charts of a step; this step is the last one, or near it."""
AFTER = 10
"""Most steps in the charts of a step that may be later ones."""
MEMBERS_LISTED = 100
"""Trajectories per page of a step."""
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


def policies(request: PageRequest) -> dict[str, Any]:
    """Load the first run, the overview, and the policies; with `part` only that one, which refreshes by itself."""
    part = request.query.get("part")
    return {
        "first_run": first_run.load(request) if part in (None, "first_run") else None,
        "overview": overview(request) if part in (None, "overview") else None,
        "policies": _cards(request) if part in (None, "policies") else [],
        "states": tuple(STATES),
    }


def _cards(request: PageRequest) -> list[dict[str, Any]]:
    """Load all policies that are served here, each with its curve."""
    names = {one.name for one in request.parts.policies()}
    rows = [row for row in store_policies.policies(request.connection, request.project) if row["name"] in names]
    # Trainable policies first.
    rows.sort(key=lambda row: (row["upstream"] is not None, row["name"]))
    return [_card(request, row) for row in rows]


def _card(request: PageRequest, row: Mapping[str, Any], beside: str | None = None) -> dict[str, Any]:
    """Load what a policy's card shows. `beside`: the policy whose rewards its curve shows too."""
    connection, project, name = request.connection, request.project, row["name"]
    versions = store_policies.states(connection, project, name, DRAWN)
    rewards = store_policies.rewards(connection, project, name)
    # All versions ever measured, including those that the curve no longer shows.
    means = version_rewards.mean_rewards(rewards)
    points = version_rewards.points(versions, means)
    live = row["live_version"]
    candidate = next((one.version for one in reversed(versions) if one.state == "candidate"), None)
    recent = store_policies.recent(connection, project, name, request.now, RECENT_H)
    other = None
    if beside is not None:
        of_other = version_rewards.mean_rewards(store_policies.rewards(connection, project, beside))
        other = version_rewards.beside(points, beside, of_other)
    return {
        "row": row,
        "curve": chart_data.rewards(points, live, candidate, other),
        "beside": other,
        # The versions with a reward, the newest first.
        "points": [point for point in reversed(points) if point.training or point.held_out],
        "means": means,
        "gain": _gain(request, name, rewards, version_rewards.comparison(versions, means, live)),
        "fewest": FEWEST_REWARDS,
        "candidate": candidate,
        "last_step": next(iter(store_policies.steps(connection, project, name, None, 1)), None),
        "recent": recent,
        "has_traffic": bool(rewards or recent["trajectories"]) or store_policies.has_traffic(connection, project, name),
    }


def _gain(
    request: PageRequest,
    name: str,
    rewards: store_policies.PolicyRewards,
    compared: version_rewards.Comparison | None,
) -> version_rewards.Gain | None:
    """Return the gain over version 0; held-out rewards are read by prompt unless they are too many."""
    if compared is None:
        return None
    before, after = (
        reward_store.held_out_rewards(request.connection, request.project, name, version)
        if version_rewards.may_be_paired(compared, rewards)
        else {}
        for version in (0, compared.version)
    )
    return version_rewards.gain(compared, rewards, before, after)


def policy(request: PageRequest) -> dict[str, Any]:
    """Load one policy with its versions, decisions and steps."""
    name = request.path["policy"]
    rows = store_policies.policies(request.connection, request.project, name)
    if not rows:
        raise NotFound(f"there is no policy {name[:200]!r} in this project")
    others = sorted({one.name for one in request.parts.policies()} - {name})
    beside = request.query.get("beside") or None
    if beside is not None and beside not in others:
        raise NotFound(f"there is no other policy {beside[:200]!r} in this project")
    before_version, before_step = _number(request.query, "versions_before"), _number(request.query, "steps_before")
    key = (request.connection, request.project, name)
    versions = store_policies.versions(*key, before_version, LISTED + 1)
    steps = store_policies.steps(*key, before_step, LISTED + 1)
    drawn = store_policies.steps(*key, None, FIGURED)[::-1]
    return {
        "policy": _card(request, rows[0], beside),
        "others": others,
        "states": tuple(STATES),
        "versions": versions[:LISTED],
        "older_versions": versions[LISTED - 1]["version"] if len(versions) > LISTED else None,
        "before_version": before_version,
        "steps": steps[:LISTED],
        "older_steps": steps[LISTED - 1]["number"] if len(steps) > LISTED else None,
        "before_step": before_step,
        "decisions": store_policies.decisions(*key),
        "handover": _handover(request, name),
        "figures": [
            (column.name, chart_data.figure(drawn, column.name)) for column in store_policies.FIGURES if len(drawn) > 1
        ],
        "keep": request.parts.settings.trainer.keep_served,
    }


def _handover(request: PageRequest, name: str) -> dict[str, Any] | None:
    """Load how far the policy has taken over from a model of another server; None without one."""
    settings = request.parts.settings.learning_of(name).handover
    state = read_handover(request.connection, request.project, name)
    if settings is None or state is None:
        return None
    return {
        "state": state,
        "shares": settings.shares,
        "last": read_last_decision(request.connection, request.project, name),
        "saved": read_saved(
            request.connection,
            request.project,
            name,
            request.parts.settings.upstream_prices.get((request.project, settings.teacher)),
        ),
    }


def step(request: PageRequest) -> dict[str, Any]:
    """Load one step."""
    name, text = request.path["policy"], request.path["number"]
    key = (request.connection, request.project, name)
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
    row = None if number is None else store_policies.step(*key, number)
    if row is None or number is None:
        raise NotFound(f"there is no step {text[:50]!r} of a policy {name[:200]!r} in this project")
    before, after = store_policies.neighbours(*key, number)
    drawn = store_policies.steps(*key, number + AFTER + 1, STEPS_DRAWN)[::-1]
    members = store_policies.trained_on(
        request.connection, request.project, row["id"], _after(request), MEMBERS_LISTED + 1
    )
    last = members[MEMBERS_LISTED - 1] if len(members) > MEMBERS_LISTED else None
    return {
        "policy": name,
        "step": row,
        "before": before,
        "after": after,
        "figures": [
            (column.name, MEANINGS[column.name], row[column.name], chart_data.figure(drawn, column.name, number))
            for column in store_policies.FIGURES
        ],
        "phases": sorted((row["phases"] or {}).items(), key=lambda phase: -phase[1]),
        "config": sorted((row["config"] or {}).items()),
        "members": members[:MEMBERS_LISTED],
        "largest": max((abs(one["advantage"]) for one in members if one["advantage"] is not None), default=0.0),
        "next_members": None if last is None else f"{last['group_id']} {last['trajectory_id']}",
        "is_first": "after" not in request.query,
    }


async def set_state(request: FormRequest) -> ActionResult:
    """Set a policy's state: train, only record, or pause."""
    name, state = _known(request), request.form.get("state", "")
    if state not in STATES:
        raise BadRequest(f"state must be one of {', '.join(STATES)}, not {state[:50]!r}")
    changed = await request.parts.recorder.commit(
        lambda connection: version_store.set_state(connection, request.project, name, state), first=True
    )
    if not changed:
        raise BadRequest(f"another server answers {name}, so it can only be recorded")
    return ActionResult(f"{name} {STATES[state]}")


async def promote(request: FormRequest) -> ActionResult:
    """Make a version live from the next request on."""
    name, version = _known(request), _version(request)
    move = await request.parts.ledger.promote(name, version, _reason(request))
    if move.before == move.live:
        return ActionResult(f"version {move.live} of {name} is live already")
    return ActionResult(f"version {move.live} of {name} is live; it replaced version {move.before}")


async def roll_back(request: FormRequest) -> ActionResult:
    """Roll back to an older version."""
    name, to = _known(request), _number(request.form, "to")
    move = await request.parts.ledger.roll_back(name, to, _reason(request))
    over = ", ".join(str(version) for version in move.rejected)
    return ActionResult(f"{name} is back at version {move.live}" + (f"; rejected: {over}" if over else ""))


async def pin(request: FormRequest) -> ActionResult:
    """Pin a version, so that it stays loaded, or unpin it."""
    name, version = _known(request), _version(request)
    pinned = request.form.get("pinned") != "no"
    await request.parts.ledger.pin(name, version, pinned=pinned)
    return ActionResult(f"version {version} of {name} is {'pinned' if pinned else 'no longer pinned'}")


async def request_step(request: FormRequest) -> ActionResult:
    """Request a policy-gradient step now, on the groups that exist."""
    name = _known(request)
    why_not = await request.parts.recorder.commit(
        lambda connection: store.request_step(connection, request.project, name, {"kind": "grpo"}, request.now),
        first=True,
    )
    if why_not is not None:
        raise StepRefused(why_not)
    request.parts.on_step_requested()
    return ActionResult(f"a step of {name} was requested; it begins as soon as the trainer is free")


def _known(request: FormRequest) -> str:
    name = request.path["policy"]
    known(request.parts.policies(), name)
    return name


def _version(request: FormRequest) -> int:
    version = _number(request.form, "version")
    if version is None:
        raise BadRequest("enter a version")
    return version


def _reason(request: FormRequest) -> str | None:
    return request.form.get("reason", "").strip()[:MOST_REASON] or None


def _after(request: PageRequest) -> tuple[str, str] | None:
    text = request.query.get("after")
    if text is None:
        return None
    group_id, _, trajectory_id = text.partition(" ")
    if not trajectory_id:
        raise BadRequest("after must be the id of a group and the id of a trajectory, as in the links of this page")
    return group_id, trajectory_id


def _number(fields: Mapping[str, str], name: str) -> int | None:
    """Return a whole number from a link or a form; None if it is missing.

    Raises:
        BadRequest: it is not a whole number.
    """
    text = fields.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest(f"{name} must be a whole number, not {text[:50]!r}")
    return int(text)
