"""The proxy's SQL of what admins ask for."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema


def ask_step(connection: Connection, project: str, policy: str, asked: Mapping[str, Any], now: datetime) -> str | None:
    """Note that a step is asked for; why it cannot be, or None."""
    p, s = schema.policies.c, schema.steps.c
    is_it = (p.project == project, p.id == policy)
    # The weak kind of lock: the proxy's own new groups refer to this row.
    found = connection.execute(select(schema.policies).where(*is_it).with_for_update(key_share=True)).one()
    if found.upstream is not None:
        return f"{policy} is answered by {found.upstream}: only what vLLM serves here can train"
    if found.state == "paused":
        return f"{policy} is paused; let it record or train first: `whetstone policies train off {policy}`"
    if found.step_asked_at is not None:
        return f"a step of {policy} is asked for already, since {found.step_asked_at:%Y-%m-%d %H:%M:%S} UTC"
    running = (s.project == project, s.policy == policy, s.ended_at.is_(None), s.lease_until > now)
    number = connection.execute(select(s.number).where(*running)).scalar()
    if number is not None:
        return f"step {number} of {policy} is running; ask again when it has ended (SELECT * FROM admin_steps)"
    connection.execute(schema.policies.update().where(*is_it).values(step_asked=dict(asked), step_asked_at=now))
    return None
