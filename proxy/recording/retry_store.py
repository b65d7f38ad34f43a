"""The proxy's SQL for retries of calls that did not get a whole answer. It decides from the tables alone."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, or_, select

from migrations import schema
from proxy.domain.call import WINDOW_S, Call
from whetstone.domain.states import TrajectoryStatus
from whetstone.domain.why_not_trained import WhyNotTrained

c, t = schema.completions.c, schema.trajectories.c


def retried_completions(connection: Connection, call: Call) -> Sequence[Any]:
    """Return the completions of the call that `call` retries (id, choice, trajectory_id); none if it is not a retry.

    A client that lost its answer sends an equal body, with a retry count or the same turn key. The call counts as a
    retry if exactly one recent call with that body (and with that trajectory and turn key, if given) did not get a
    whole answer. Otherwise a retry cannot be distinguished from the next member of a group.
    """
    address = call.address
    if call.request_digest is None or not (address.retry or address.turn_key):
        return ()
    unanswered = [
        c.project == call.project,
        c.request_digest == call.request_digest,
        c.request_digest.is_not(None),
        c.call_id != call.id,
        c.created_at.between(call.created_at - timedelta(seconds=WINDOW_S), call.created_at),
    ]
    if address.turn_key:
        unanswered.append(c.turn_key == address.turn_key)
    sibling = c.trajectory_id.startswith(f"{call.trajectory_id}.", autoescape=True)
    of_trajectory = or_(c.trajectory_id == call.trajectory_id, sibling)
    unanswered.append(c.threaded_by == "new" if call.threaded_by == "new" else of_trajectory)
    rows = connection.execute(select(c.id, c.call_id, c.choice, c.trajectory_id).where(*unanswered)).all()
    return rows if len({row.call_id for row in rows}) == 1 else ()


def supersede(connection: Connection, call: Call, retried: Sequence[Any]) -> None:
    """Mark the completions that `call` retries as superseded."""
    connection.execute(
        schema.completions.update()
        .where(c.project == call.project, c.id.in_([row.id for row in retried]))
        .values(why_not_trained=WhyNotTrained.SUPERSEDED.value, request_digest=None)
    )
    for row in retried:
        if row.trajectory_id == call.trajectory_id:
            continue
        # A trajectory that has no other completion was no attempt. Its group is placed without it.
        others = select(c.id).where(c.project == call.project, c.trajectory_id == row.trajectory_id, c.id != row.id)
        connection.execute(
            schema.trajectories.update()
            .where(t.project == call.project, t.id == row.trajectory_id, ~others.exists())
            .where(t.state.in_((TrajectoryStatus.OPEN, TrajectoryStatus.ENDED)))
            .values(state=TrajectoryStatus.EXCLUDED, why_not_trained=WhyNotTrained.SUPERSEDED.value, placed_at=None)
        )
