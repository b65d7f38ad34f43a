"""Writes what became of trajectories, and tells the groups they belong to. Decides nothing and knows no SQL."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection

from judge import store, store_groups
from judge.facts import Group, Trajectory
from judge.trajectories import alone


def record(
    connection: Connection, project: str, changed: Sequence[Trajectory], groups: Mapping[str, Group], now: datetime
) -> None:
    """Write them, and have their groups looked at; `groups` are those the caller has locked, by id.

    What is alone is placed again. So is what was placed while the caller waited for its lock: its group is not among
    those, and to lock it now would be against the order; placing it again tells that group.
    """
    store.write_trajectories(connection, project, changed)
    told = {one.group_id for one in changed if one.group_id is not None}
    store.mark_due(connection, project, told & groups.keys(), now)
    strangers = {one.id for one in changed if one.group_id in told - groups.keys()}
    states = {group.id: group.state for group in groups.values()}
    lone = {one.id for one in changed if alone(one, states.get(one.group_id or ""))}
    store_groups.place_again(connection, project, strangers | lone)
