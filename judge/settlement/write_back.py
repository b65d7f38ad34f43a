"""Write changed trajectories, and mark their groups as due."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import Connection

from judge.decisions.model import Group, Trajectory
from judge.decisions.trajectory_lifecycle import alone
from judge.store import groups as store_groups
from judge.store import unit_of_work


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
