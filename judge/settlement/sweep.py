"""Run one sweep over what is due: short transactions that read under lock, decide and write.

`apply` and `record` are the same for other transactions that give rewards: of reward functions, of judges.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine

from judge.decisions.feedback import apply_feedback
from judge.decisions.grouping import PlacementContext, assign_groups, original_of, wanted
from judge.decisions.lifecycle import advance_group, alone, ended, failed
from judge.decisions.model import UNCLAIMED, Feedback, Group, Rules, Trajectory
from judge.settlement.batch_runner import Work, drain
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
    rules = rules_of(settings, learning or {}, judges)
    idle_since = now - timedelta(seconds=settings.idle_s)
    due = unit_of_work.look(engine, now, idle_since)
    swept = Swept(code="code" in due, ranking="ranking" in due)
    if "unplaced" in due:
        swept.placed = drain(engine, _placing(now, rules))
    if "fresh" in due:
        swept.feedback += drain(engine, _applying("fresh", now, rules))
    if "withdrawn" in due:
        swept.feedback += drain(engine, _applying("withdrawn", now, rules))
        swept.feedback += drain(engine, _applying("applied", now, rules))
    if "waiting" in due:
        swept.feedback += drain(engine, _applying("waiting", now, rules))
    if "idle" in due:
        swept.idle = drain(engine, _ending(idle_since, now, rules))
    if swept.feedback or swept.idle:
        # A trajectory that got a reward and has no group that waits for it gets a group of its own.
        swept.placed += drain(engine, _placing(now, rules))
    # What was just placed, applied or ended has made its groups due.
    if "groups" in due or swept.placed or swept.feedback or swept.idle:
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
        find=store_groups.unplaced,
        do=lambda connection, batch: _place(connection, batch, now, rules),
        again=lambda _, project, one: {project: [one]},
        set_aside=lambda connection, project, one, _: unit_of_work.set_aside(connection, project, one[0], now),
    )


def _applying(kind: unit_of_work.FeedbackKind, now: datetime, rules: Rules) -> Work[Feedback]:
    return Work(
        find=lambda connection, limit: unit_of_work.due_feedback(connection, kind, now, limit),
        do=lambda connection, batch: apply(connection, batch, now, rules),
        again=lambda connection, project, one: unit_of_work.feedback_of(connection, project, one.id),
        set_aside=lambda connection, project, one, why: unit_of_work.set_feedback_aside(
            connection, project, one.id, why
        ),
    )


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
        changed = [one for one in placed.trajectories if one != around.trajectories[one.id]]
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
        unclaimed = [group for group in groups.values() if group.state in UNCLAIMED]
        unit_of_work.no_longer_due(connection, project, groups.keys() - {group.id for group in unclaimed})
        decided = [advance_group(group, members[group.id], now, rules) for group in unclaimed]
        assessed = [group for group, _ in decided]
        changed = [
            after
            for group, members_after in decided
            for before, after in zip(members[group.id], members_after, strict=True)
            if after != before
        ]
        unit_of_work.write_trajectories(connection, project, changed)
        unit_of_work.write_groups(connection, project, assessed)
        for group in assessed:
            if group.state == "scored":
                swept.scored += 1
                ids = [member.id for member in members[group.id]]
                with log_setup.about(project=project, group=group.id, policy=group.policy, trajectories=ids):
                    log.info("scored")
        swept.ranking |= any(group.judge_due_at is not None for group in assessed)


def record(
    connection: Connection, project: str, changed: Sequence[Trajectory], groups: Mapping[str, Group], now: datetime
) -> None:
    """Write the trajectories and mark their groups as due; `groups` are those that the caller has locked, by id.

    A trajectory that is alone is placed again. So is one that was placed while the caller waited for its lock: its
    group is not among `groups`, and locking it now would break the lock order; placing it again marks that group as
    due.
    """
    unit_of_work.write_trajectories(connection, project, changed)
    group_ids = {one.group_id for one in changed if one.group_id is not None}
    unit_of_work.mark_due(connection, project, group_ids & groups.keys(), now)
    strangers = {one.id for one in changed if one.group_id in group_ids - groups.keys()}
    states = {group.id: group.state for group in groups.values()}
    lone = {one.id for one in changed if alone(one, states.get(one.group_id or ""))}
    store_groups.place_again(connection, project, strangers | lone)
