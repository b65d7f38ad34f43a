"""The pages of policies: all policies, live; one policy with its versions, decisions and steps; and the actions on
it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.api.admin import store
from proxy.api.admin.policies import known
from proxy.dashboard.interfaces import Action, ActionResult, FormRequest, Page, PageRequest
from proxy.dashboard.queries import policies as store_policies
from proxy.dashboard.queries import steps as store_steps
from proxy.dashboard.queries.policies import PolicyRow, RecentTraffic
from proxy.dashboard.views import chart_data
from proxy.dashboard.views.chart_data import Point
from proxy.errors import BadRequest, NotFound, StepRefused
from whetstone.registry import version_store

DRAWN = 400
"""Most versions in a curve, the newest."""
LISTED = 25
"""Versions per page, and steps per page."""
FIGURED = 120
"""Most steps in the small charts of a policy."""
RECENT_H = 24
MOST_REASON = 500
STATES = {"training": "trains from now on", "recording": "is only recorded from now on", "paused": "is paused"}
NAV = "/ui/policies"


@dataclass(frozen=True)
class PolicyCard:
    """A policy as its card shows it."""

    row: PolicyRow
    curve: Mapping[str, Any]
    points: Sequence[Point]
    """The versions with a reward, the newest first."""
    live: Point | None
    """Mean reward of the live version; None while none of its trajectories has a reward."""
    base: Point | None
    """Mean reward of version 0; None as above."""
    rewards: Mapping[int, Point]
    """Mean reward of every version that has one."""
    candidate: int | None
    last_step: Mapping[str, Any] | None
    recent: RecentTraffic
    has_traffic: bool

    @property
    def gain(self) -> float | None:
        """Return by how much the live version's mean reward exceeds version 0's."""
        if self.live is None or self.base is None or self.live.version == 0:
            return None
        return None if self.live.mean is None or self.base.mean is None else self.live.mean - self.base.mean


def load_card(request: PageRequest, row: PolicyRow) -> PolicyCard:
    """Load what a policy's card shows."""
    connection, project = request.connection, request.project
    versions = store_policies.states(connection, project, row.name, DRAWN)
    rewards = store_policies.rewards(connection, project, row.name, 0)
    points = chart_data.points(versions, rewards)
    # All versions ever measured, including those that the curve no longer shows.
    by_version = chart_data.measured(rewards)
    candidate = next((one.version for one in reversed(versions) if one.state == "candidate"), None)
    recent = store_policies.recent(connection, project, row.name, request.now, RECENT_H)
    steps = store_steps.newest(connection, project, row.name, None, 1)
    return PolicyCard(
        row=row,
        curve=chart_data.rewards(points, row.live_version, candidate),
        points=[point for point in reversed(points) if point.rewarded],
        live=by_version.get(row.live_version),
        base=by_version.get(0),
        rewards=by_version,
        candidate=candidate,
        last_step=steps[0] if steps else None,
        recent=recent,
        has_traffic=bool(rewards or recent.trajectories) or store_policies.has_traffic(connection, project, row.name),
    )


def policies(request: PageRequest) -> dict[str, Any]:
    """Load all policies that are served here, each with its curve."""
    names = {one.name for one in request.parts.policies()}
    rows = [row for row in store_policies.policies(request.connection, request.project) if row.name in names]
    # Trainable policies first.
    rows.sort(key=lambda row: (row.upstream is not None, row.name))
    return {"policies": [load_card(request, row) for row in rows], "states": tuple(STATES)}


def policy(request: PageRequest) -> dict[str, Any]:
    """Load one policy with its versions, decisions and steps."""
    name = request.path["policy"]
    row = store_policies.policy(request.connection, request.project, name)
    if row is None:
        raise NotFound(f"there is no policy {name[:200]!r} in this project")
    before_version, before_step = number(request.query, "versions_before"), number(request.query, "steps_before")
    key = (request.connection, request.project, name)
    versions = store_policies.versions(*key, before_version, LISTED + 1)
    steps = store_steps.newest(*key, before_step, LISTED + 1)
    drawn = store_steps.newest(*key, None, FIGURED)[::-1]
    card = load_card(request, row)
    return {
        "policy": card,
        "states": tuple(STATES),
        "versions": versions[:LISTED],
        "older_versions": versions[LISTED - 1]["version"] if len(versions) > LISTED else None,
        "before_version": before_version,
        "steps": steps[:LISTED],
        "older_steps": steps[LISTED - 1]["number"] if len(steps) > LISTED else None,
        "before_step": before_step,
        "decisions": store_policies.decisions(*key),
        "figures": [
            (column.name, chart_data.figure(drawn, column.name)) for column in store_steps.FIGURES if len(drawn) > 1
        ],
        "keep": request.parts.settings.trainer.keep_served,
    }


def number(fields: Mapping[str, str], name: str) -> int | None:
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
    return ActionResult(f"{name} {STATES[state]}", request.form.get("to") if request.form.get("to") == NAV else None)


async def promote(request: FormRequest) -> ActionResult:
    """Make a version live from the next request on."""
    name, version = _known(request), _version(request)
    move = await request.parts.ledger.promote(name, version, _reason(request))
    if move.before == move.live:
        return ActionResult(f"version {move.live} of {name} is live already")
    return ActionResult(f"version {move.live} of {name} is live; it replaced version {move.before}")


async def roll_back(request: FormRequest) -> ActionResult:
    """Roll back to an older version."""
    name, to = _known(request), number(request.form, "to")
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
    version = number(request.form, "version")
    if version is None:
        raise BadRequest("enter a version")
    return version


def _reason(request: FormRequest) -> str | None:
    return request.form.get("reason", "").strip()[:MOST_REASON] or None


PAGES = (
    Page("/ui/policies", "policies.html", policies, NAV),
    Page("/ui/policies/{policy}", "policy.html", policy, NAV),
)
ACTIONS = (
    Action("/ui/policies/{policy}/state", set_state, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/promote", promote, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/rollback", roll_back, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/pin", pin, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/step", request_step, "/ui/policies/{policy}"),
)
