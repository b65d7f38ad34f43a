"""The judge's SQL for placing: trajectories that are not placed yet, and the groups that are created for them.

A transaction that places trajectories locks their policies first, then groups, then trajectories, as the trainer does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection, func, select

from judge.decisions.model import OVER, UNCLAIMED, Group
from judge.store.unit_of_work import IS_ATTEMPT
from migrations import schema
from whetstone.domain.why_not_trained import WhyNotTrained

p, g, t, c = schema.policies.c, schema.groups.c, schema.trajectories.c, schema.completions.c


def unplaced(connection: Connection, limit: int) -> dict[str, dict[str, str]]:
    """Return the oldest trajectories that are not placed yet: by project, their ids and policies. Not locked."""
    query = select(t.project, t.id, t.policy).where(t.placed_at.is_(None)).order_by(t.created_at).limit(limit)
    by_project: dict[str, dict[str, str]] = {}
    for row in connection.execute(query):
        by_project.setdefault(row.project, {})[row.id] = row.policy
    return {project: by_project[project] for project in sorted(by_project)}


def lock_policies(connection: Connection, project: str, policies: Collection[str]) -> None:
    """Stop others from placing trajectories of these policies, and from claiming a step, until the transaction ends."""
    query = select(p.id).where(p.project == project, p.id.in_(sorted(policies))).order_by(p.id)
    connection.execute(query.with_for_update(key_share=True)).all()


def unclaimed(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Return those of these trajectories that no step has claimed or can claim. The caller has locked the policies."""
    is_one = (t.project == project, t.id.in_(sorted(trajectory_ids)))
    return set(connection.scalars(select(t.id).where(*is_one, t.state.not_in(sorted(OVER)))))


def newest_of_prompts(
    connection: Connection, project: str, until: Mapping[tuple[str, str], datetime]
) -> dict[tuple[str, str], str]:
    """Return (policy, prompt hash) -> id of its newest group that began before `until`."""
    newest_of = {}
    for (policy, prompt_hash), before in until.items():
        of_prompt = (g.project == project, g.policy == policy, g.prompt_hash == prompt_hash, g.created_at < before)
        newest = connection.scalar(select(g.id).where(*of_prompt).order_by(g.created_at.desc()).limit(1))
        if newest is not None:
            newest_of[policy, prompt_hash] = str(newest)
    return newest_of


def sizes(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, int]:
    """Return the number of members of each of these groups. The caller has locked their policies."""
    members = (t.project == project, t.group_id.in_(sorted(group_ids)))
    query = select(t.group_id, func.count()).where(*members, IS_ATTEMPT).group_by(t.group_id)
    return dict.fromkeys(group_ids, 0) | {str(group_id): int(count) for group_id, count in connection.execute(query)}


def open_groups(connection: Connection, project: str, groups: Sequence[Group]) -> None:
    """Add new groups; they are due."""
    if groups:
        connection.execute(schema.groups.insert(), [{"project": project, **asdict(group)} for group in groups])


def drop_groups(connection: Connection, project: str, group_ids: Collection[str]) -> None:
    """Delete groups of ours that have no members any more. The caller has locked them."""
    connection.execute(schema.groups.delete().where(g.project == project, g.id.in_(group_ids)))


def set_aside(connection: Connection, project: str, group_id: str, why: str, now: datetime) -> None:
    """Discard a group because of a fault, and exclude its members, unless a step has them."""
    is_one = (g.project == project, g.id == group_id, g.state.in_(UNCLAIMED))
    discarded = {"state": "discarded", "reason": why, "due_at": None, "judge_due_at": None, "closed_at": now}
    connection.execute(schema.groups.update().where(*is_one).values(discarded))
    members = (t.project == project, t.group_id == group_id, t.state.in_(("open", "ended", "rewarded")))
    connection.execute(
        schema.trajectories.update().where(*members).values(why_not_trained=WhyNotTrained.FAULT, state="excluded")
    )


def mark_placed(connection: Connection, project: str, trajectory_ids: Collection[str], now: datetime) -> None:
    """Record that these trajectories are placed and that their groups were marked as due."""
    is_one = (t.project == project, t.id.in_(trajectory_ids))
    connection.execute(schema.trajectories.update().where(*is_one, t.placed_at.is_(None)).values(placed_at=now))


def place_again(connection: Connection, project: str, trajectory_ids: Collection[str]) -> None:
    """Mark these trajectories to be placed again. The caller has locked them."""
    is_one = (t.project == project, t.id.in_(trajectory_ids))
    connection.execute(schema.trajectories.update().where(*is_one).values(placed_at=None))


def broken_off(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Return those of these trajectories whose last completion failed or was aborted."""
    tail = (c.project == t.project) & (c.id == t.tail_completion_id)
    is_one = (t.project == project, t.id.in_(sorted(trajectory_ids)))
    query = select(t.id).join(schema.completions, tail).where(*is_one, c.status != "complete")
    return set(connection.scalars(query))
