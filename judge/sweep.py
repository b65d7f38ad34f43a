"""One look at what is due: short transactions that read under lock, decide and write. Knows no SQL and no Celery."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine

from judge import store
from judge.assemble import assess
from judge.facts import Feedback, Rules
from judge.settle import settle
from judge.trajectories import ended, explained
from whetstone.settings import GroupSettings

BATCH = 200
"""Feedback, trajectories or groups per transaction: long enough to share its cost, short enough to let others write."""


@dataclass(slots=True)
class Swept:
    """How much a sweep did."""

    placed: int = 0
    """Trajectories whose groups were told of them."""
    feedback: int = 0
    """Feedbacks looked at."""
    idle: int = 0
    """Trajectories that ended by idleness."""
    groups: int = 0
    """Groups looked at."""
    scored: int = 0
    """Groups that a step may claim now."""


def sweep(engine: Engine, settings: GroupSettings, now: datetime) -> Swept:
    """Do all that is due at `now`. Safe beside another sweep; what one leaves half done the next one finishes.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. Each transaction before that stands.
    """
    swept = Swept()
    rules = rules_of(settings)
    idle_since = now - timedelta(seconds=settings.idle_s)
    due = store.look(engine, now, idle_since)
    if due.unplaced:
        swept.placed = _drain(engine, lambda connection: _place(connection, now))
    if due.fresh:
        swept.feedback += _drain(engine, lambda connection: _apply_fresh(connection, now, rules))
    if due.waiting:
        swept.feedback += _drain(engine, lambda connection: _apply_waiting(connection, now, rules))
    if due.idle:
        swept.idle = _drain(engine, lambda connection: _end_idle(connection, idle_since, now))
    # What was just applied or ended has made its groups due.
    if due.groups or swept.placed or swept.feedback or swept.idle:
        swept.groups = _drain(engine, lambda connection: _assess(connection, now, rules, swept))
    return swept


def rules_of(settings: GroupSettings) -> Rules:
    """The settings as decisions take them."""
    return Rules(
        target_size=settings.target_size,
        minimum_size=settings.minimum_size,
        deadline=timedelta(seconds=settings.deadline_s),
        feedback_waits=timedelta(seconds=settings.feedback_waits_s),
    )


def _drain(engine: Engine, batch: Callable[[Connection], int]) -> int:
    """Run transactions of one batch each until one is not full; return how much they did."""
    total = 0
    while True:
        with engine.begin() as connection:
            done = batch(connection)
        total += done
        if done < BATCH:
            return total


def _place(connection: Connection, now: datetime) -> int:
    """Tell groups of their new members, which may reopen them, and give new trajectories their first reason."""
    found = store.unplaced(connection, BATCH)
    for project, trajectories in found.items():
        groups = store.lock_groups(connection, project, {one.group_id for one in trajectories if one.group_id})
        store.mark_due(connection, project, groups.keys(), now)
        ids = {one.id for one in trajectories}
        locked = store.lock_trajectories(connection, project, ids).values()
        states = {group.id: group.state for group in groups.values()}
        after = [(one, explained(one, states.get(one.group_id or ""))) for one in locked]
        store.write_trajectories(connection, project, [new for old, new in after if new != old])
        store.mark_placed(connection, project, ids, now)
    return sum(map(len, found.values()))


def _apply_fresh(connection: Connection, now: datetime, rules: Rules) -> int:
    return _apply(connection, store.fresh_feedback(connection, BATCH), now, rules)


def _apply_waiting(connection: Connection, now: datetime, rules: Rules) -> int:
    return _apply(connection, store.waiting_feedback(connection, now, BATCH), now, rules)


def _apply(connection: Connection, found: dict[str, list[Feedback]], now: datetime, rules: Rules) -> int:
    for project, batch in found.items():
        known = store.known(connection, project, batch)
        settled = settle(batch, known, now, rules)
        store.write_feedback(connection, project, settled.feedback)
        store.write_trajectories(connection, project, settled.trajectories)
        moved = {one.group_id for one in settled.trajectories if one.group_id is not None}
        store.mark_due(connection, project, moved, now)
    return sum(map(len, found.values()))


def _end_idle(connection: Connection, idle_since: datetime, now: datetime) -> int:
    found = store.idle(connection, idle_since, BATCH)
    for project, trajectories in found.items():
        groups = store.lock_groups(connection, project, {one.group_id for one in trajectories if one.group_id})
        locked = store.lock_trajectories(connection, project, {one.id for one in trajectories}).values()
        # What went on before it was locked is no longer idle.
        still = [one for one in locked if one.state == "open" and one.last_seen_at <= idle_since]
        store.write_trajectories(connection, project, [ended(one, now) for one in still])
        store.mark_due(connection, project, groups.keys(), now)
    return sum(map(len, found.values()))


def _assess(connection: Connection, now: datetime, rules: Rules, swept: Swept) -> int:
    found = store.due_groups(connection, now, BATCH)
    for project, group_ids in found.items():
        groups = store.lock_groups(connection, project, group_ids)
        members = store.lock_members(connection, project, group_ids)
        over = [group.id for group in groups.values() if group.state not in store.UNCLAIMED]
        store.no_longer_due(connection, project, over)
        assessed, changed = [], []
        for group in groups.values():
            if group.state in store.UNCLAIMED:
                after, members_after = assess(group, members[group.id], now, rules)
                assessed.append(after)
                changed += [new for old, new in zip(members[group.id], members_after, strict=True) if new != old]
        store.write_trajectories(connection, project, changed)
        store.write_groups(connection, project, assessed)
        swept.scored += sum(group.state == "scored" for group in assessed)
    return sum(map(len, found.values()))
