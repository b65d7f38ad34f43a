"""The judge's SQL of placing: which trajectories have no place yet, and the groups that are made for them.

Whoever places trajectories locks their policies first, then groups, then trajectories, as the trainer does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection, func, select

from judge.facts import OVER, UNCLAIMED, Group
from judge.store import IS_ATTEMPT
from migrations import schema
from whetstone.reasons import WhyNotTrained

p, g, t, c = schema.policies.c, schema.groups.c, schema.trajectories.c, schema.completions.c


def unplaced(connection: Connection, limit: int) -> dict[str, dict[str, str]]:
    """The oldest trajectories that were not placed yet: by project, their ids and policies. Not locked."""
    query = select(t.project, t.id, t.policy).where(t.placed_at.is_(None)).order_by(t.created_at).limit(limit)
    found: dict[str, dict[str, str]] = {}
    for row in connection.execute(query):
        found.setdefault(row.project, {})[row.id] = row.policy
    return {project: found[project] for project in sorted(found)}


def lock_policies(connection: Connection, project: str, policies: Collection[str]) -> None:
    """Let nobody else place trajectories of these policies, nor claim a step of them, until the transaction ends."""
    query = select(p.id).where(p.project == project, p.id.in_(sorted(policies))).order_by(p.id)
    connection.execute(query.with_for_update(key_share=True)).all()


def unclaimed(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Those of these trajectories that no step has claimed, nor will: the caller has locked their policies."""
    is_one = (t.project == project, t.id.in_(sorted(trajectory_ids)))
    return set(connection.scalars(select(t.id).where(*is_one, t.state.not_in(sorted(OVER)))))


def newest_of_prompts(
    connection: Connection, project: str, until: Mapping[tuple[str, str], datetime]
) -> dict[tuple[str, str], str]:
    """(policy, prompt hash) to the id of its newest group that began before `until`."""
    found = {}
    for (policy, prompt_hash), before in until.items():
        of_prompt = (g.project == project, g.policy == policy, g.prompt_hash == prompt_hash, g.created_at < before)
        newest = connection.scalar(select(g.id).where(*of_prompt).order_by(g.created_at.desc()).limit(1))
        if newest is not None:
            found[policy, prompt_hash] = str(newest)
    return found


def sizes(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, int]:
    """How many members each of these groups has. The caller has locked their policies."""
    members = (t.project == project, t.group_id.in_(sorted(group_ids)))
    query = select(t.group_id, func.count()).where(*members, IS_ATTEMPT).group_by(t.group_id)
    return dict.fromkeys(group_ids, 0) | {str(group_id): int(count) for group_id, count in connection.execute(query)}


def open_groups(connection: Connection, project: str, groups: Sequence[Group]) -> None:
    """Add new groups; they are due."""
    if groups:
        connection.execute(schema.groups.insert(), [{"project": project, **asdict(group)} for group in groups])


def drop_groups(connection: Connection, project: str, group_ids: Collection[str]) -> None:
    """Delete groups of ours that nobody belongs to any more. The caller has locked them."""
    connection.execute(schema.groups.delete().where(g.project == project, g.id.in_(group_ids)))


def set_aside(connection: Connection, project: str, group_id: str, why: str, now: datetime) -> None:
    """Leave a group alone, and its members with it, unless a step has them."""
    is_one = (g.project == project, g.id == group_id, g.state.in_(UNCLAIMED))
    discarded = {"state": "discarded", "reason": why, "due_at": None, "judge_due_at": None, "closed_at": now}
    connection.execute(schema.groups.update().where(*is_one).values(discarded))
    members = (t.project == project, t.group_id == group_id, t.state.in_(("open", "ended", "rewarded")))
    connection.execute(
        schema.trajectories.update().where(*members).values(why_not_trained=WhyNotTrained.FAULT, state="excluded")
    )


def mark_placed(connection: Connection, project: str, trajectory_ids: Collection[str], now: datetime) -> None:
    """Note that these trajectories have their place, and that their groups were told of them."""
    is_one = (t.project == project, t.id.in_(trajectory_ids))
    connection.execute(schema.trajectories.update().where(*is_one, t.placed_at.is_(None)).values(placed_at=now))


def place_again(connection: Connection, project: str, trajectory_ids: Collection[str]) -> None:
    """Have these trajectories placed anew. The caller has locked them."""
    is_one = (t.project == project, t.id.in_(trajectory_ids))
    connection.execute(schema.trajectories.update().where(*is_one).values(placed_at=None))


def broken_off(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Those of these trajectories whose last completion failed or was aborted."""
    tail = (c.project == t.project) & (c.id == t.tail_completion_id)
    is_one = (t.project == project, t.id.in_(sorted(trajectory_ids)))
    query = select(t.id).join(schema.completions, tail).where(*is_one, c.status != "complete")
    return set(connection.scalars(query))
