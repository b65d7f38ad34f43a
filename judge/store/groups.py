"""The judge's SQL for placing: trajectories that are not placed yet, and the groups that are created for them.

A transaction that places trajectories locks their policies first, then groups, then trajectories, as the trainer does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from sqlalchemy import Connection, func, select

from judge.decisions.model import OVER, UNCLAIMED, Group
from judge.store.unit_of_work import IS_ATTEMPT, by_project, update_rows
from migrations import schema
from whetstone.domain.why_not_trained import WhyNotTrained

p, g, t, c = schema.policies.c, schema.groups.c, schema.trajectories.c, schema.completions.c


def unplaced(connection: Connection, limit: int) -> dict[str, list[tuple[str, str]]]:
    """Return the oldest trajectories that are not placed yet: by project, their ids and policies. Not locked."""
    query = select(t.project, t.id, t.policy).where(t.placed_at.is_(None)).order_by(t.created_at).limit(limit)
    return by_project((project, (name, policy)) for project, name, policy in connection.execute(query))


def lock_policies(connection: Connection, project: str, policies: Collection[str]) -> None:
    """Stop others from placing trajectories of these policies, and from claiming a step, until the transaction ends."""
    query = select(p.id).where(p.project == project, p.id.in_(sorted(policies))).order_by(p.id)
    connection.execute(query.with_for_update(key_share=True)).all()


def unclaimed(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Return those of these trajectories that no step has claimed or can claim. The caller has locked the policies."""
    query = select(t.id).where(t.project == project, t.id.in_(sorted(trajectory_ids)), t.state.not_in(sorted(OVER)))
    return set(connection.scalars(query))


def newest_of_prompts(
    connection: Connection, project: str, until: Mapping[tuple[str, str], datetime]
) -> dict[tuple[str, str], str]:
    """Return (policy, prompt hash) -> id of its newest group that began before `until`."""
    query = select(g.id).where(g.project == project).order_by(g.created_at.desc()).limit(1)
    newest_of = {
        (policy, prompt_hash): connection.scalar(
            query.where(g.policy == policy, g.prompt_hash == prompt_hash, g.created_at < before)
        )
        for (policy, prompt_hash), before in until.items()
    }
    return {prompt: newest for prompt, newest in newest_of.items() if newest is not None}


def sizes(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, int]:
    """Return the number of members of each of these groups. The caller has locked their policies."""
    is_member = (t.project == project, t.group_id.in_(sorted(group_ids)), IS_ATTEMPT)
    query = select(t.group_id, func.count()).where(*is_member).group_by(t.group_id)
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
    update_rows(
        connection, schema.groups, *is_one, state="discarded", reason=why, due_at=None, judge_due_at=None, closed_at=now
    )
    members = (t.project == project, t.group_id == group_id, t.state.in_(("open", "ended", "rewarded")))
    update_rows(connection, schema.trajectories, *members, why_not_trained=WhyNotTrained.FAULT, state="excluded")


def mark_placed(connection: Connection, project: str, trajectory_ids: Collection[str], now: datetime) -> None:
    """Record that these trajectories are placed and that their groups were marked as due."""
    is_one = (t.project == project, t.id.in_(trajectory_ids), t.placed_at.is_(None))
    update_rows(connection, schema.trajectories, *is_one, placed_at=now)


def place_again(connection: Connection, project: str, trajectory_ids: Collection[str]) -> None:
    """Mark these trajectories to be placed again. The caller has locked them."""
    update_rows(connection, schema.trajectories, t.project == project, t.id.in_(trajectory_ids), placed_at=None)


def broken_off(connection: Connection, project: str, trajectory_ids: Collection[str]) -> set[str]:
    """Return those of these trajectories whose last completion failed or was aborted."""
    tail = (c.project == t.project) & (c.id == t.tail_completion_id) & (c.status != "complete")
    query = select(t.id).join(schema.completions, tail)
    return set(connection.scalars(query.where(t.project == project, t.id.in_(sorted(trajectory_ids)))))
