"""Run the SQL of the admin routes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, or_, select

from migrations import schema
from whetstone.domain.ids import IMPORTED_LOG
from whetstone.domain.states import PolicyState, StepState


def request_step(
    connection: Connection, project: str, policy: str, wanted: Mapping[str, Any], now: datetime
) -> str | None:
    """Store a request for a step. Return why it is refused, or None."""
    p, s = schema.policies.c, schema.steps.c
    is_it = (p.project == project, p.id == policy)
    # The weaker lock: new groups of the proxy refer to this row.
    row = connection.execute(select(schema.policies).where(*is_it).with_for_update(key_share=True)).one()
    if row.upstream is not None:
        return f"{policy} is answered by {row.upstream}: only what vLLM serves here can train"
    if row.state == PolicyState.PAUSED:
        return f"{policy} is paused; let it record or train first: `whetstone policies train off {policy}`"
    if row.step_asked_at is not None:
        return f"a step of {policy} is asked for already, since {row.step_asked_at:%Y-%m-%d %H:%M:%S} UTC"
    is_running = or_(s.lease_until > now, s.state == StepState.WAITING_GATE)
    running = (s.project == project, s.policy == policy, s.ended_at.is_(None), is_running)
    step = connection.execute(select(s.number, s.state).where(*running)).one_or_none()
    if step is not None:
        what = "waits for the tests of its candidate" if step.state == StepState.WAITING_GATE else "is running"
        return f"step {step.number} of {policy} {what}; ask again when it has ended (SELECT * FROM admin_steps)"
    connection.execute(schema.policies.update().where(*is_it).values(step_asked=dict(wanted), step_asked_at=now))
    return None


def imported(connection: Connection, project: str) -> list[str]:
    """Return the policies that only store an imported log: supervised steps may learn from it."""
    p = schema.policies.c
    query = select(p.id).where(p.project == project, p.upstream == IMPORTED_LOG).order_by(p.id)
    return [str(one) for one in connection.execute(query).scalars()]


def policies(connection: Connection, project: str) -> list[dict[str, Any]]:
    """Return the policies as admins see them, ordered by name."""
    p = schema.policies.c
    query = (
        select(p.id.label("policy"), p.base_model, p.live_version, p.state, p.upstream, p.aliases, p.created_at)
        .where(p.project == project)
        .order_by(p.id)
    )
    return [dict(row._mapping) for row in connection.execute(query)]
