"""Run one sweep over what is due: short transactions that read under lock, decide and write."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import Connection, Engine

from judge.decisions.apply_feedback import apply_feedback
from judge.decisions.group_lifecycle import advance_group
from judge.decisions.grouping import PlacementContext, assign_groups, original_of, wanted
from judge.decisions.model import UNCLAIMED, Feedback, Rules, Trajectory
from judge.decisions.trajectory_lifecycle import ended, failed
from judge.settlement.batch_runner import Work, drain
from judge.settlement.write_back import record
from judge.store import groups as store_groups
from judge.store import unit_of_work
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings
from whetstone.observability import log_setup

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Swept:
    """The numbers of a sweep."""

    placed: int = 0
    """Trajectories whose groups were marked as due."""
    feedback: int = 0
    """Feedbacks processed."""
    idle: int = 0
    """Trajectories that ended because they were idle."""
    groups: int = 0
    """Groups processed."""
    scored: int = 0
    """Groups that a step may claim now."""
    code: bool = False
    """Whether trajectories are due for reward functions."""
    ranking: bool = False
    """Whether groups are due for judges."""


def sweep(
    engine: Engine,
    settings: GroupSettings,
    now: datetime,
    learning: Mapping[str, RewardSettings] | None = None,
    judges: Collection[str] = (),
) -> Swept:
    """Do all that is due at `now`. Safe beside another sweep; the next sweep finishes what this one leaves unfinished.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable. Each earlier transaction stays.
    """
    swept = Swept()
    rules = rules_of(settings, learning or {}, judges)
    idle_since = now - timedelta(seconds=settings.idle_s)
    due = unit_of_work.look(engine, now, idle_since)
    swept.code, swept.ranking = due.code, due.ranking
    if due.unplaced:
        swept.placed = drain(engine, _placing(now, rules))
    if due.fresh:
        swept.feedback += drain(engine, _applying(unit_of_work.fresh_feedback, now, rules))
    if due.withdrawn:
        for find in (unit_of_work.withdrawn_feedback, unit_of_work.withdrawn_applied):
            swept.feedback += drain(engine, _applying(partial(_at, find, now), now, rules))
    if due.waiting:
        swept.feedback += drain(engine, _applying(partial(_at, unit_of_work.waiting_feedback, now), now, rules))
    if due.idle:
        swept.idle = drain(engine, _ending(idle_since, now, rules))
    if swept.feedback or swept.idle:
        # A trajectory that got a reward and has no group that waits for it gets a group of its own.
        swept.placed += drain(engine, _placing(now, rules))
    # What was just placed, applied or ended has made its groups due.
    if due.groups or swept.placed or swept.feedback or swept.idle:
        swept.groups = drain(engine, _assessing(now, rules, swept))
    return swept


def rules_of(settings: GroupSettings, learning: Mapping[str, RewardSettings], judges: Collection[str] = ()) -> Rules:
    """Return the settings in the form that decisions take."""
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
        do=lambda connection, batch: _place(connection, batch, now, rules),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, _: unit_of_work.set_aside(connection, project, one[0], now),
    )


def _applying(
    find: Callable[[Connection, int], dict[str, list[Feedback]]], now: datetime, rules: Rules
) -> Work[Feedback]:
    return Work(
        find=find,
        do=lambda connection, batch: apply(connection, batch, now, rules),
        again=lambda connection, project, one: unit_of_work.feedback_of(connection, project, one.id),
        set_aside=lambda connection, project, one, why: unit_of_work.set_feedback_aside(
            connection, project, one.id, why
        ),
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
        find=lambda connection, limit: unit_of_work.idle(connection, idle_since, limit),
        do=lambda connection, batch: _end_idle(connection, batch, idle_since, now, rules),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, _: unit_of_work.set_aside(connection, project, one.id, now),
    )


def _assessing(now: datetime, rules: Rules, swept: Swept) -> Work[str]:
    return Work(
        find=lambda connection, limit: unit_of_work.due_groups(connection, now, limit),
        do=lambda connection, batch: _assess(connection, batch, now, rules, swept),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, why: store_groups.set_aside(connection, project, one, why, now),
    )


def _place(
    connection: Connection, by_project: Mapping[str, list[tuple[str, str]]], now: datetime, rules: Rules
) -> None:
    """Give trajectories their group and first reason, and mark groups with new members as due.

    This may reopen groups.
    """
    for project, pairs in by_project.items():
        policy_of = dict(pairs)
        store_groups.lock_policies(connection, project, set(policy_of.values()))
        unplaced = unit_of_work.still_unplaced(connection, project, policy_of.keys())
        around = _around(connection, project, unplaced, rules)
        placed = assign_groups(around, now, rules)
        store_groups.open_groups(connection, project, placed.opened)
        before = around.trajectories
        changed = [one for one in placed.trajectories if one != before[one.id]]
        unit_of_work.write_trajectories(connection, project, changed)
        joined = {one.group_id for one in placed.trajectories if one.group_id is not None}
        unit_of_work.mark_due(connection, project, joined & around.groups.keys(), now)
        store_groups.drop_groups(connection, project, placed.left)
        store_groups.mark_placed(connection, project, around.unplaced, now)


def _around(connection: Connection, project: str, unplaced: Sequence[Trajectory], rules: Rules) -> PlacementContext:
    """Return all that placing them may change, locked; the caller has locked their policies."""
    ids = {one.id for one in unplaced}
    drawn_for = {original for one in unplaced if (original := original_of(one))}
    originals = store_groups.unclaimed(connection, project, drawn_for)
    newest = store_groups.newest_of_prompts(connection, project, wanted(unplaced, rules))
    group_ids = unit_of_work.groups_of(connection, project, ids | originals) | set(newest.values())
    groups = unit_of_work.lock_unclaimed(connection, project, group_ids)
    trajectories = unit_of_work.lock_trajectories(connection, project, ids | originals)
    return PlacementContext(trajectories, ids, groups, store_groups.sizes(connection, project, groups.keys()), newest)


def apply(connection: Connection, by_project: Mapping[str, list[Feedback]], now: datetime, rules: Rules) -> None:
    """Apply feedback, by project. The caller has locked its rows."""
    for project, batch in by_project.items():
        known = unit_of_work.known(connection, project, batch)
        settled = apply_feedback(batch, known, now, rules)
        unit_of_work.write_feedback(connection, project, settled.feedback)
        unit_of_work.let_stand(connection, project, settled.restored)
        record(connection, project, settled.trajectories, known.groups, now)
        unit_of_work.ask_to_close(connection, project, settled.closing, now)
        unit_of_work.ask_to_rank(connection, project, settled.ranking, now)


def _end_idle(
    connection: Connection,
    by_project: Mapping[str, list[Trajectory]],
    idle_since: datetime,
    now: datetime,
    rules: Rules,
) -> None:
    for project, trajectories in by_project.items():
        groups = unit_of_work.lock_groups(connection, project, {one.group_id for one in trajectories if one.group_id})
        locked = unit_of_work.lock_trajectories(connection, project, {one.id for one in trajectories}).values()
        # A trajectory that continued before it was locked is no longer idle.
        still = [one for one in locked if one.state == "open" and one.last_seen_at <= idle_since]
        broken = store_groups.broken_off(connection, project, {one.id for one in still})
        over = [ended(one, now, rules) for one in still]
        worth = [failed(one, rules.learning_of(one.policy)) if one.id in broken else one for one in over]
        record(connection, project, worth, groups, now)


def _assess(
    connection: Connection, by_project: Mapping[str, list[str]], now: datetime, rules: Rules, swept: Swept
) -> None:
    for project, group_ids in by_project.items():
        groups = unit_of_work.lock_groups(connection, project, group_ids)
        members = unit_of_work.lock_members(connection, project, group_ids)
        over = [group.id for group in groups.values() if group.state not in UNCLAIMED]
        unit_of_work.no_longer_due(connection, project, over)
        assessed, changed = [], []
        for group in groups.values():
            if group.state in UNCLAIMED:
                after, members_after = advance_group(group, members[group.id], now, rules)
                assessed.append(after)
                changed += [new for old, new in zip(members[group.id], members_after, strict=True) if new != old]
        unit_of_work.write_trajectories(connection, project, changed)
        unit_of_work.write_groups(connection, project, assessed)
        for group in assessed:
            if group.state == "scored":
                ids = [member.id for member in members[group.id]]
                with log_setup.about(project=project, group=group.id, policy=group.policy, trajectories=ids):
                    log.info("scored")
        swept.ranking |= any(group.judge_due_at is not None for group in assessed)
        swept.scored += sum(group.state == "scored" for group in assessed)
