"""One look at what is due: short transactions that read under lock, decide and write. Knows no SQL and no Celery."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection, Engine

from judge import store, store_groups
from judge.assemble import assess
from judge.batches import Work, drain
from judge.facts import UNCLAIMED, Feedback, Rules, Trajectory
from judge.place import Around, original_of, place, wanted
from judge.record import record
from judge.settle import settle
from judge.trajectories import ended, failed
from whetstone import logs
from whetstone.settings import GroupSettings
from whetstone.worth import LearningSettings

log = logging.getLogger(__name__)


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
    code: bool = False
    """Whether reward functions have trajectories to look at."""
    ranking: bool = False
    """Whether judges have groups to look at."""


def sweep(
    engine: Engine,
    settings: GroupSettings,
    now: datetime,
    learning: Mapping[str, LearningSettings] | None = None,
    judges: Collection[str] = (),
) -> Swept:
    """Do all that is due at `now`. Safe beside another sweep; what one leaves half done the next one finishes.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. Each transaction before that stands.
    """
    swept = Swept()
    rules = rules_of(settings, learning or {}, judges)
    idle_since = now - timedelta(seconds=settings.idle_s)
    due = store.look(engine, now, idle_since)
    swept.code, swept.ranking = due.code, due.ranking
    if due.unplaced:
        swept.placed = drain(engine, _placing(now, rules))
    if due.fresh:
        swept.feedback += drain(engine, _applying(store.fresh_feedback, now, rules))
    if due.withdrawn:
        for find in (store.withdrawn_feedback, store.withdrawn_applied):
            swept.feedback += drain(engine, _applying(partial(_at, find, now), now, rules))
    if due.waiting:
        swept.feedback += drain(engine, _applying(partial(_at, store.waiting_feedback, now), now, rules))
    if due.idle:
        swept.idle = drain(engine, _ending(idle_since, now, rules))
    if swept.feedback or swept.idle:
        # What got a reward and belongs to no group that waits for it gets one of its own.
        swept.placed += drain(engine, _placing(now, rules))
    # What was just placed, applied or ended has made its groups due.
    if due.groups or swept.placed or swept.feedback or swept.idle:
        swept.groups = drain(engine, _assessing(now, rules, swept))
    return swept


def rules_of(settings: GroupSettings, learning: Mapping[str, LearningSettings], judges: Collection[str] = ()) -> Rules:
    """The settings as decisions take them."""
    return Rules(
        target_size=settings.target_size,
        minimum_size=settings.minimum_size,
        deadline=timedelta(seconds=settings.deadline_s),
        feedback_waits=timedelta(seconds=settings.feedback_waits_s),
        prompt_window=timedelta(seconds=settings.prompt_window_s),
        learning=learning,
        judges=frozenset(judges),
    )


def _placing(now: datetime, rules: Rules) -> Work[tuple[str, str]]:
    return Work(
        find=lambda connection, limit: {
            project: list(policies.items()) for project, policies in store_groups.unplaced(connection, limit).items()
        },
        do=lambda connection, found: _place(connection, found, now, rules),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, _: store.set_aside(connection, project, one[0], now),
    )


def _applying(
    find: Callable[[Connection, int], dict[str, list[Feedback]]], now: datetime, rules: Rules
) -> Work[Feedback]:
    return Work(
        find=find,
        do=lambda connection, found: apply(connection, found, now, rules),
        again=lambda connection, project, one: store.feedback_of(connection, project, one.id),
        set_aside=lambda connection, project, one, why: store.set_feedback_aside(connection, project, one.id, why),
    )


def _at(
    find: Callable[[Connection, datetime, int], dict[str, list[Feedback]]],
    now: datetime,
    connection: Connection,
    limit: int,
) -> dict[str, list[Feedback]]:
    return find(connection, now, limit)


def _ending(idle_since: datetime, now: datetime, rules: Rules) -> Work[Trajectory]:
    return Work(
        find=lambda connection, limit: store.idle(connection, idle_since, limit),
        do=lambda connection, found: _end_idle(connection, found, idle_since, now, rules),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, _: store.set_aside(connection, project, one.id, now),
    )


def _assessing(now: datetime, rules: Rules, swept: Swept) -> Work[str]:
    return Work(
        find=lambda connection, limit: store.due_groups(connection, now, limit),
        do=lambda connection, found: _assess(connection, found, now, rules, swept),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, why: store_groups.set_aside(connection, project, one, why, now),
    )


def _place(connection: Connection, found: Mapping[str, list[tuple[str, str]]], now: datetime, rules: Rules) -> None:
    """Give trajectories their group and their first reason, and tell groups of new members, which may reopen them."""
    for project, pairs in found.items():
        policy_of = dict(pairs)
        store_groups.lock_policies(connection, project, set(policy_of.values()))
        unplaced = store.still_unplaced(connection, project, policy_of.keys())
        around = _around(connection, project, unplaced, rules)
        placed = place(around, now, rules)
        store_groups.open_groups(connection, project, placed.opened)
        before = around.trajectories
        changed = [one for one in placed.trajectories if one != before[one.id]]
        store.write_trajectories(connection, project, changed)
        joined = {one.group_id for one in placed.trajectories if one.group_id is not None}
        store.mark_due(connection, project, joined & around.groups.keys(), now)
        store_groups.drop_groups(connection, project, placed.left)
        store_groups.mark_placed(connection, project, around.unplaced, now)


def _around(connection: Connection, project: str, unplaced: Sequence[Trajectory], rules: Rules) -> Around:
    """All that placing them may change, locked; the caller has locked their policies."""
    ids = {one.id for one in unplaced}
    drawn_for = {original for one in unplaced if (original := original_of(one))}
    originals = store_groups.unclaimed(connection, project, drawn_for)
    newest = store_groups.newest_of_prompts(connection, project, wanted(unplaced, rules))
    group_ids = store.groups_of(connection, project, ids | originals) | set(newest.values())
    groups = store.lock_unclaimed(connection, project, group_ids)
    trajectories = store.lock_trajectories(connection, project, ids | originals)
    return Around(trajectories, ids, groups, store_groups.sizes(connection, project, groups.keys()), newest)


def apply(connection: Connection, found: Mapping[str, list[Feedback]], now: datetime, rules: Rules) -> None:
    """Settle feedback whose rows the caller has locked, by project."""
    for project, batch in found.items():
        known = store.known(connection, project, batch)
        settled = settle(batch, known, now, rules)
        store.write_feedback(connection, project, settled.feedback)
        store.let_stand(connection, project, settled.kept)
        record(connection, project, settled.trajectories, known.groups, now)
        store.ask_to_close(connection, project, settled.closing, now)
        store.ask_to_rank(connection, project, settled.ranking, now)


def _end_idle(
    connection: Connection, found: Mapping[str, list[Trajectory]], idle_since: datetime, now: datetime, rules: Rules
) -> None:
    for project, trajectories in found.items():
        groups = store.lock_groups(connection, project, {one.group_id for one in trajectories if one.group_id})
        locked = store.lock_trajectories(connection, project, {one.id for one in trajectories}).values()
        # What went on before it was locked is no longer idle.
        still = [one for one in locked if one.state == "open" and one.last_seen_at <= idle_since]
        broken = store_groups.broken_off(connection, project, {one.id for one in still})
        over = [ended(one, now, rules) for one in still]
        worth = [failed(one, rules.learning_of(one.policy)) if one.id in broken else one for one in over]
        record(connection, project, worth, groups, now)


def _assess(connection: Connection, found: Mapping[str, list[str]], now: datetime, rules: Rules, swept: Swept) -> None:
    for project, group_ids in found.items():
        groups = store.lock_groups(connection, project, group_ids)
        members = store.lock_members(connection, project, group_ids)
        over = [group.id for group in groups.values() if group.state not in UNCLAIMED]
        store.no_longer_due(connection, project, over)
        assessed, changed = [], []
        for group in groups.values():
            if group.state in UNCLAIMED:
                after, members_after = assess(group, members[group.id], now, rules)
                assessed.append(after)
                changed += [new for old, new in zip(members[group.id], members_after, strict=True) if new != old]
        store.write_trajectories(connection, project, changed)
        store.write_groups(connection, project, assessed)
        for group in assessed:
            if group.state == "scored":
                ids = [member.id for member in members[group.id]]
                with logs.about(project=project, group=group.id, policy=group.policy, trajectories=ids):
                    log.info("scored")
        swept.ranking |= any(group.judge_due_at is not None for group in assessed)
        swept.scored += sum(group.state == "scored" for group in assessed)
