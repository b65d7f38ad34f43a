"""The pages of policies: all policies, live; one policy with its versions, decisions and steps; and the actions on
it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.api.admin import store
from proxy.api.admin.policies import known
from proxy.dashboard.interfaces import Acting, Action, Asked, Done, Page
from proxy.dashboard.queries import policies as store_policies
from proxy.dashboard.queries import steps as store_steps
from proxy.dashboard.queries.policies import PolicyRow, Recent
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
STATES = {"training": "trains from now on", "recording": "only records from now on", "paused": "is paused"}
NAV = "/ui/policies"


@dataclass(frozen=True)
class Shown:
    """A policy as its card shows it."""

    row: PolicyRow
    curve: Mapping[str, Any]
    points: Sequence[Point]
    """The versions with a reward, the newest first."""
    live: Point | None
    """Mean reward of the live version; None while none of its trajectories has a reward."""
    base: Point | None
    """Mean reward of version 0; None as above."""
    worth: Mapping[int, Point]
    """Mean reward of every version that has one."""
    candidate: int | None
    last_step: Mapping[str, Any] | None
    recent: Recent
    asked_ever: bool

    @property
    def gain(self) -> float | None:
        """Return by how much the live version's mean reward exceeds version 0's."""
        if self.live is None or self.base is None or self.live.version == 0:
            return None
        return None if self.live.mean is None or self.base.mean is None else self.live.mean - self.base.mean


def show(asked: Asked, row: PolicyRow) -> Shown:
    """Load what a policy's card shows."""
    connection, project = asked.connection, asked.project
    became = store_policies.states(connection, project, row.name, DRAWN)
    worths = store_policies.worth(connection, project, row.name, 0)
    points = chart_data.points(became, worths)
    # All versions ever measured, including those that the curve no longer shows.
    by_version = chart_data.measured(worths)
    candidate = next((one.version for one in reversed(became) if one.state == "candidate"), None)
    recent = store_policies.recent(connection, project, row.name, asked.now, RECENT_H)
    steps = store_steps.newest(connection, project, row.name, None, 1)
    return Shown(
        row=row,
        curve=chart_data.rewards(points, row.live_version, candidate),
        points=[point for point in reversed(points) if point.rewarded],
        live=by_version.get(row.live_version),
        base=by_version.get(0),
        worth=by_version,
        candidate=candidate,
        last_step=steps[0] if steps else None,
        recent=recent,
        asked_ever=bool(worths or recent.trajectories) or store_policies.was_asked(connection, project, row.name),
    )


def policies(asked: Asked) -> dict[str, Any]:
    """Load all policies that are served here, each with its curve."""
    names = {one.name for one in asked.parts.policies()}
    rows = [row for row in store_policies.policies(asked.connection, asked.project) if row.name in names]
    # Trainable policies first.
    rows.sort(key=lambda row: (row.upstream is not None, row.name))
    return {"policies": [show(asked, row) for row in rows], "states": tuple(STATES)}


def policy(asked: Asked) -> dict[str, Any]:
    """Load one policy with its versions, decisions and steps."""
    name = asked.path["policy"]
    row = store_policies.policy(asked.connection, asked.project, name)
    if row is None:
        raise NotFound(f"there is no policy {name[:200]!r} in this project")
    before_version, before_step = number(asked.query, "versions_before"), number(asked.query, "steps_before")
    told = (asked.connection, asked.project, name)
    versions = store_policies.versions(*told, before_version, LISTED + 1)
    steps = store_steps.newest(*told, before_step, LISTED + 1)
    drawn = store_steps.newest(*told, None, FIGURED)[::-1]
    shown = show(asked, row)
    return {
        "policy": shown,
        "states": tuple(STATES),
        "versions": versions[:LISTED],
        "older_versions": versions[LISTED - 1]["version"] if len(versions) > LISTED else None,
        "before_version": before_version,
        "worth": shown.worth,
        "steps": steps[:LISTED],
        "older_steps": steps[LISTED - 1]["number"] if len(steps) > LISTED else None,
        "before_step": before_step,
        "decisions": store_policies.decisions(*told),
        "figures": [
            (column.name, chart_data.figure(drawn, column.name)) for column in store_steps.FIGURES if len(drawn) > 1
        ],
        "keep": asked.parts.settings.trainer.keep_served,
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


async def set_state(acting: Acting) -> Done:
    """Set a policy's state: train, only record, or pause."""
    name, state = _known(acting), acting.form.get("state", "")
    if state not in STATES:
        raise BadRequest(f"state must be one of {', '.join(STATES)}, not {state[:50]!r}")
    changed = await acting.parts.recorder.commit(
        lambda connection: version_store.set_state(connection, acting.project, name, state), first=True
    )
    if not changed:
        raise BadRequest(f"{name} is answered by another server: it only records")
    return Done(f"{name} {STATES[state]}", acting.form.get("to") if acting.form.get("to") == NAV else None)


async def promote(acting: Acting) -> Done:
    """Make a version live from the next request on."""
    name, version = _known(acting), _version(acting)
    move = await acting.parts.ledger.promote(name, version, _reason(acting))
    if move.before == move.live:
        return Done(f"version {move.live} of {name} is live already")
    return Done(f"version {move.live} of {name} is live; before it was {move.before}")


async def roll_back(acting: Acting) -> Done:
    """Roll back to an older version."""
    name, to = _known(acting), number(acting.form, "to")
    move = await acting.parts.ledger.roll_back(name, to, _reason(acting))
    over = ", ".join(str(version) for version in move.rejected)
    return Done(f"{name} is back at version {move.live}" + (f"; rejected: {over}" if over else ""))


async def pin(acting: Acting) -> Done:
    """Pin a version, so that it stays loaded, or unpin it."""
    name, version = _known(acting), _version(acting)
    pinned = acting.form.get("pinned") != "no"
    await acting.parts.ledger.pin(name, version, pinned=pinned)
    return Done(f"version {version} of {name} is {'pinned' if pinned else 'no longer pinned'}")


async def ask_step(acting: Acting) -> Done:
    """Request a policy-gradient step now, on the groups that exist."""
    name = _known(acting)
    why_not = await acting.parts.recorder.commit(
        lambda connection: store.request_step(connection, acting.project, name, {"kind": "grpo"}, acting.now),
        first=True,
    )
    if why_not is not None:
        raise StepRefused(why_not)
    acting.parts.step_asked()
    return Done(f"a step of {name} is asked for; it begins as soon as the trainer is free")


def _known(acting: Acting) -> str:
    name = acting.path["policy"]
    known(acting.parts.policies(), name)
    return name


def _version(acting: Acting) -> int:
    version = number(acting.form, "version")
    if version is None:
        raise BadRequest("say which version")
    return version


def _reason(acting: Acting) -> str | None:
    return acting.form.get("reason", "").strip()[:MOST_REASON] or None


PAGES = (
    Page("/ui/policies", "policies.html", policies, NAV),
    Page("/ui/policies/{policy}", "policy.html", policy, NAV),
)
ACTIONS = (
    Action("/ui/policies/{policy}/state", set_state, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/promote", promote, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/rollback", roll_back, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/pin", pin, "/ui/policies/{policy}"),
    Action("/ui/policies/{policy}/step", ask_step, "/ui/policies/{policy}"),
)
