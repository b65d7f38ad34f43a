"""Decide when a step is due and which groups it takes: fresh enough, enough of them, the oldest first. Pure.

A step is due in one of four ways: there are enough groups; fewer groups have waited for long; a schedule has fired; it
was requested by hand.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, count, product

from celery.schedules import crontab

from trainer.domain.eligible_groups import Candidate
from whetstone.config.trainer import TrainerSettings

SINGLES_LIMIT = 4
"""A step takes at most this many times the singles that make one due: enough to catch up, and a bound on its length."""


@dataclass(frozen=True)
class Choice:
    """What to do with the candidates."""

    taken: tuple[Candidate, ...]
    """What the step takes, or would if one were due."""
    waits_for: str | None
    """Why no step is due; None where one is."""
    discarded: Mapping[str, tuple[str, ...]]
    """Reason -> ids of groups that can never be trained on any more."""
    staleness: Mapping[int, int]
    """Version -> updates between it and the live one, along the lineage."""

    @property
    def claimed(self) -> tuple[Candidate, ...]:
        """Return what a step takes now; empty while none is due."""
        return self.taken if self.waits_for is None else ()


def last_fired(schedule: str, now: datetime) -> datetime:
    """Return when `schedule` (cron's five fields, UTC) last fired, `now` included.

    It is computed, not stored, so the result is the same after any restart. Months, days of the month and days of the
    week must all match, as Celery reads them. A schedule that never fires is not supported.
    """
    cron = crontab.from_string(schedule)
    times = sorted(product(cron.hour, cron.minute), reverse=True)
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = (
        day
        for day in (today - timedelta(days=ago) for ago in count())
        if day.month in cron.month_of_year and day.day in cron.day_of_month and day.isoweekday() % 7 in cron.day_of_week
    )
    moments = (day.replace(hour=hour, minute=minute) for day in days for hour, minute in times)
    return next(moment for moment in moments if moment <= now)


def choose(
    candidates: Sequence[Candidate],
    lineage: Sequence[int],
    now: datetime,
    settings: TrainerSettings,
    *,
    live_since: datetime | None = None,
    by_hand: bool = False,
) -> Choice:
    """Choose the groups of the next step. `live_since`: when the live version was promoted; None: long ago.
    `by_hand`: whether it was requested by hand; it is then due with anything that can teach.

    Uniform groups are dropped before the batch (as DAPO's dynamic sampling does, arXiv 2503.14476): the better the
    policy, the more of them there are, and a step of a few groups that differ would be as large as one of many.

    A step is due with `groups_per_step` other groups, or `singles_per_step` trajectories that are alone, or parts of
    both that add up to a whole; after `step_waits_s`, `min_groups_per_step` are enough. In addition, `min_fresh_share`
    of their sampled tokens must lie in trajectories that the live version answered from beginning to end, or the oldest
    group must have waited for `fresh_waits_s` while that version was live: what closed during a long step waits on.
    With a `schedule`, the step takes what was closed before the schedule last fired, fresh or not (waiting brings no
    more), from `min_groups_per_step` on. Of more than
    `max_groups_per_step` groups, or SINGLES_LIMIT times `singles_per_step` singles, the oldest are taken, except for
    the places that are reserved for fresh groups.
    """
    staleness = {version: updates for updates, version in enumerate(lineage)}
    discarded: dict[str, list[str]] = {}
    uniform: list[Candidate] = []
    usable: list[Candidate] = []
    for group in candidates:
        if not group.versions <= staleness.keys():
            discarded.setdefault("off_lineage", []).append(group.group_id)
        elif max(staleness[version] for version in group.versions) > settings.max_staleness:
            discarded.setdefault("stale", []).append(group.group_id)
        else:
            (uniform if group.uniform else usable).append(group)
    taken: list[Candidate] = []
    waits_for: str | None
    if not usable:
        waits_for = _nothing({reason: len(ids) for reason, ids in discarded.items()} | {"group_uniform": len(uniform)})
    elif settings.schedule is not None and not by_hand:
        taken, waits_for = _scheduled(usable, lineage[0], now, settings, settings.schedule)
    else:
        taken = _within_limits(usable, lineage[0], settings)
        waits_for = None if by_hand else _not_due(taken, lineage[0], live_since, now, settings)
    # Until a step is taken, a revised reward may still make their members differ.
    due = waits_for is None
    over = [group.group_id for group in uniform if due or group.waited_s(now) >= settings.fresh_waits_s]
    if over:
        discarded["group_uniform"] = over
    return Choice(tuple(taken), waits_for, {reason: tuple(ids) for reason, ids in discarded.items()}, staleness)


def _scheduled(
    usable: Sequence[Candidate], live: int, now: datetime, settings: TrainerSettings, schedule: str
) -> tuple[list[Candidate], str | None]:
    fired = last_fired(schedule, now)
    taken = _within_limits([group for group in usable if group.closed_at < fired], live, settings)
    if _enough(taken, settings.min_groups_per_step, settings):
        return taken, None
    counted = _counted(taken, settings.min_groups_per_step, settings)
    return taken, f"of what was closed before the schedule last fired ({fired:%Y-%m-%d %H:%M} UTC), {counted}"


def _not_due(
    taken: Sequence[Candidate], live: int, live_since: datetime | None, now: datetime, settings: TrainerSettings
) -> str | None:
    """Return why these groups make no step due yet (too few, or too stale); None if they do."""
    waited_s = max(group.waited_s(now) for group in taken)
    if not _enough(taken, settings.groups_per_step, settings):
        counted = _counted(taken, settings.groups_per_step, settings)
        if settings.step_waits_s is None:
            return counted
        if waited_s < settings.step_waits_s:
            return f"{counted}; the oldest has waited for {waited_s:.0f} of {settings.step_waits_s:g} s"
        if not _enough(taken, settings.min_groups_per_step, settings):
            return _counted(taken, settings.min_groups_per_step, settings)
    fresh, tokens = sum(group.fresh_tokens(live) for group in taken), sum(group.tokens for group in taken)
    waits = "the oldest has waited"
    live_s = math.inf if live_since is None else (now - live_since).total_seconds()
    if live_s < waited_s:
        waits, waited_s = "that version has been live", live_s
    if fresh >= settings.min_fresh_share * tokens or waited_s >= settings.fresh_waits_s:
        return None
    return (
        f"{fresh / tokens:.0%} of their tokens are version {live}'s, of {settings.min_fresh_share:.0%} needed; "
        f"{waits} for {waited_s:.0f} of {settings.fresh_waits_s:g} s"
    )


def _within_limits(candidates: Sequence[Candidate], live: int, settings: TrainerSettings) -> list[Candidate]:
    groups = [candidate for candidate in candidates if not candidate.alone]
    singles = [candidate for candidate in candidates if candidate.alone]
    share = settings.min_fresh_share
    return [
        *_within(groups, settings.max_groups_per_step, live, share),
        *_within(singles, SINGLES_LIMIT * settings.singles_per_step, live, share),
    ]


def _within(candidates: Sequence[Candidate], limit: int, live: int, fresh_share: float) -> list[Candidate]:
    """Return candidates that fit into `limit` places, at least one: the oldest, but with a share of fresh
    candidates."""
    limit = max([limit, *(candidate.places for candidate in candidates[:1])])
    if sum(candidate.places for candidate in candidates) <= limit:
        return list(candidates)
    fresh = [candidate for candidate in candidates if candidate.fresh_tokens(live) == candidate.tokens]
    reserved = _first(fresh, math.ceil(fresh_share * limit))
    names = {candidate.group_id for candidate in reserved}
    left = limit - sum(candidate.places for candidate in reserved)
    return _first([candidate for candidate in candidates if candidate.group_id not in names], left) + reserved


def _first(candidates: Sequence[Candidate], places: int) -> list[Candidate]:
    ends = accumulate(candidate.places for candidate in candidates)
    return [candidate for candidate, end in zip(candidates, ends, strict=True) if end <= places]


def _places(taken: Sequence[Candidate]) -> tuple[int, int]:
    """Return the number of groups and the number of singles."""
    groups = sum(candidate.places for candidate in taken if not candidate.alone)
    return groups, sum(candidate.places for candidate in taken if candidate.alone)


def _enough(taken: Sequence[Candidate], needed: int, settings: TrainerSettings) -> bool:
    """Return whether groups + singles · groups_per_step / singles_per_step reaches `needed`.

    Integers avoid rounding errors.
    """
    groups, singles = _places(taken)
    return groups * settings.singles_per_step + singles * settings.groups_per_step >= needed * settings.singles_per_step


def _counted(taken: Sequence[Candidate], needed: int, settings: TrainerSettings) -> str:
    groups, singles = _places(taken)
    if not singles:
        return f"{groups} of {needed} groups are there"
    worth = groups + singles * settings.groups_per_step / settings.singles_per_step
    return f"{groups} groups and {singles} singles are there, worth {worth:.1f} of {needed} groups"


def _nothing(counts: Mapping[str, int]) -> str:
    """Return why there is nothing to train on, from the number of groups by reason."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
    return f"of {sum(counts.values())} scored groups none can teach: {reasons}" if reasons else "no group is scored"
