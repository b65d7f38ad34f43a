"""Write the gate's decisions in SQL: probed, promoted, rejected, or waiting for tests.

The step's state changes with them.

Each function is one move, inside its caller's transaction. Like all other writers, they lock the policy first.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from trainer.domain.claims import Claim, Probe, StepLease, ToolChat
from trainer.store.step_ends import end_step, update_step
from whetstone.registry.versions import decide, lock, make_live, reject

v = schema.policy_versions.c


def note_probe(
    connection: Connection, claim: Claim, probe: Probe, decision: str, reason: str | None, now: datetime
) -> None:
    """Record the probe's result and the decision, and that of `retention` where it was tested.

    Raises:
        LeaseLost: another worker has the step.
    """
    lock(connection, claim.project, claim.policy)
    update_step(connection, claim)
    is_it = (v.project == claim.project, v.id == claim.name_out)
    columns = {"probe_k3": probe.k3, "probe_tokens": probe.tokens}
    connection.execute(schema.policy_versions.update().where(*is_it).values(columns))
    decide(
        connection,
        claim.project,
        claim.policy,
        claim.version_out,
        test="probe",
        decision=decision,
        now=now,
        against=claim.version_in,
        reason=reason,
        figures=probe.figures,
    )
    if probe.retention is not None:
        decide(
            connection,
            claim.project,
            claim.policy,
            claim.version_out,
            test="retention",
            decision=probe.retention.decision,
            now=now,
            against=0,
            reason=probe.retention.reason,
            figures=probe.retention.figures,
        )


def wait_for_tests(connection: Connection, claim: Claim, figures: Mapping[str, Any]) -> None:
    """Send a candidate that passed the probe into the tests. Its step waits for them, and no worker owns it any more.

    Raises:
        LeaseLost: another worker has the step.
    """
    update_step(connection, claim, state="waiting_gate", lease_until=None, **figures)


def promoted(
    connection: Connection, step: StepLease, keep_served: int, figures: Mapping[str, Any], now: datetime
) -> str | None:
    """Promote the candidate and end its step. Return why it was not promoted; None where it was.

    It is not promoted where it was rejected meanwhile (together with an ancestor), or where another version has gone
    live than the one it was trained from and compared with. A candidate that was promoted by hand meanwhile is left
    unchanged.

    Raises:
        LeaseLost: another worker has the step.
    """
    policy = lock(connection, step.project, step.policy)
    state, reason = candidate(connection, step)
    if state == "rejected":
        why = reason or "it was rejected meanwhile"
    elif state == "candidate" and policy is not None and policy.live_version != step.version_in:
        why = (
            f"version {policy.live_version} has gone live meanwhile; it was trained from version {step.version_in} and "
            "compared with that"
        )
    else:
        end_step(connection, step, "promoted", now, {**figures})
        if state == "candidate":
            make_live(connection, step.project, step.policy, step.version_out, keep_served, now)
        return None
    rejected(connection, step, why, figures, now)
    return why


def rejected(connection: Connection, step: StepLease, reason: str, figures: Mapping[str, Any], now: datetime) -> None:
    """Reject the candidate and end its step. Its trajectories count as trained, so that none is trained on twice.

    A candidate that was promoted by hand meanwhile stays live: that decision was made knowing that it was not tested.

    Raises:
        LeaseLost: another worker has the step.
    """
    lock(connection, step.project, step.policy)
    state, _ = candidate(connection, step)
    by_hand = state in ("live", "retired")
    end_step(connection, step, "promoted" if by_hand else "rejected", now, {"error": reason, **figures})
    if state == "candidate":
        reject(connection, step.project, step.policy, step.version_out, reason, now)


def candidate(connection: Connection, step: StepLease) -> tuple[str, str | None]:
    """Return the state of the version that the step made, and why it was rejected."""
    query = select(v.state, v.reason).where(v.project == step.project, v.id == step.name_out)
    state, reason = connection.execute(query).one()
    return state, reason


def read_tool_chats(connection: Connection, claim: Claim, most: int) -> list[ToolChat]:
    """Return first turns of the step's trajectories in which tools were offered."""
    c, s = schema.completions.c, schema.step_trajectories.c
    query = (
        select(c.new_messages, c.tools)
        .join(schema.step_trajectories, (s.project == c.project) & (s.trajectory_id == c.trajectory_id))
        .where(s.project == claim.project, s.step_id == claim.id, c.turn == 0, c.policy == claim.policy)
        .where(c.endpoint == "chat.completions", c.status == "complete", c.tools.is_not(None))
        .order_by(c.id)
        .limit(most)
    )
    return [ToolChat(row.new_messages, row.tools) for row in connection.execute(query)]
