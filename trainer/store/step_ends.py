"""End steps in SQL: update a step's row under its fencing token, and set the last state of all it took."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, and_, case, func, or_, select

from migrations import schema
from trainer.domain.claims import StepLease
from trainer.domain.figures import EndedStep
from trainer.errors import LeaseLost
from whetstone.database.engine import chunks

UNFINISHED = ("claimed", "trained", "loaded", "waiting_gate")
FIGURES = (
    "version_in", "version_out", "groups", "trajectories", "baselined", "completions", "rows", "sampled_tokens",
    "read_tokens", "reward_mean", "reward_spread", "advantage_spread", "loss", "kl", "entropy", "mismatch_k3",
    "fresh_share", "masked_share", "effective_share", "grad_norm", "learning_rate", "tokens_per_s", "seconds",
)  # fmt: skip
"""Columns of `steps` that are one number for the whole step."""


def update_step(connection: Connection, claim: StepLease, **values: Any) -> None:
    """Write into the step's row; without values only check that it is still ours.

    Raises:
        LeaseLost: another worker has it.
    """
    s = schema.steps.c
    ours = and_(s.project == claim.project, s.id == claim.id, s.attempt == claim.attempt, s.state.in_(UNFINISHED))
    changed = connection.execute(schema.steps.update().where(ours).values(**(values or {"attempt": claim.attempt})))
    if not changed.rowcount:
        raise LeaseLost(f"step {claim.id} belongs to another worker")


def end_step(connection: Connection, claim: StepLease, state: str, now: datetime, figures: dict[str, Any]) -> None:
    """End the step, and with it its groups, trajectories and feedback.

    Raises:
        LeaseLost: another worker has it.
    """
    update_step(connection, claim, state=state, ended_at=now, lease_until=None, **figures)
    if claim.kind == "sft" and state == "promoted":
        _use_demonstrations(connection, claim)
    project, s = claim.project, schema.step_trajectories.c
    members = and_(s.project == claim.project, s.step_id == claim.id)
    if state in ("promoted", "rejected"):
        taught = and_(members, s.advantage.is_not(None))
        groups, trajectories = select(s.group_id).where(taught), select(s.trajectory_id).where(taught)
        _close_books(connection, project, groups, trajectories, step=claim.number)
        members = and_(members, s.advantage.is_(None))
    default = "step_failed" if state == "failed" else "group_uniform"
    t = schema.trajectories.alias()
    why = func.coalesce(t.c.why_not_trained, default)
    joined = and_(members, t.c.project == s.project, t.c.id == s.trajectory_id)
    reasons = connection.execute(select(why).where(joined).distinct()).scalars()
    # A group gets the first reason; the step's own reason comes before those of single trajectories.
    for reason in sorted(reasons, key=lambda reason: (reason != default, reason)):
        of_reason = and_(joined, why == reason)
        groups, trajectories = select(s.group_id).where(of_reason), select(s.trajectory_id).where(of_reason)
        _close_books(connection, project, groups, trajectories, reason=reason)


def last_ended(connection: Connection, project: str, policy: str) -> EndedStep | None:
    """Return the figures of the policy's newest step that is over."""
    s = schema.steps.c
    query = (
        select(schema.steps)
        .where(s.project == project, s.policy == policy, s.ended_at.is_not(None))
        .order_by(s.number.desc())
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    figures = {name: row._mapping[name] for name in FIGURES if row._mapping[name] is not None}
    figures |= {f"phases/{phase}": seconds for phase, seconds in (row.phases or {}).items()}
    figures |= {f"discarded/{reason}": groups for reason, groups in (row.discarded or {}).items()}
    return EndedStep(policy, row.number, row.ended_at, figures)


def _use_demonstrations(connection: Connection, claim: StepLease) -> None:
    """Record on feedback that was only a demonstration which step learned it first. It may be learned again."""
    e, f = schema.examples.c, schema.feedback.c
    learned = select(e.source_id).where(e.project == claim.project, e.policy == claim.policy, e.step == claim.number)
    only = and_(f.project == claim.project, f.source == "demonstration", f.state == "applied")
    connection.execute(
        schema.feedback.update()
        .where(only, f.id.in_(learned.where(e.left_out.is_(None))))
        .values(state="used", reason=None, step=claim.number)
    )


def discard(connection: Connection, project: str, group_ids: Sequence[str], reason: str) -> None:
    """Discard groups, and their members that would have been trained on."""
    t = schema.trajectories.c
    for some in chunks(group_ids):
        members = select(t.id).where(t.project == project, t.group_id.in_(some), t.state == "rewarded")
        _close_books(connection, project, some, members, reason=reason)


def _close_books(
    connection: Connection,
    project: str,
    groups: Sequence[str] | Select[tuple[str]],
    trajectories: Select[tuple[str]],
    *,
    step: int | None = None,
    reason: str | None = None,
) -> None:
    """Set the last state of groups, trajectories and their feedback: trained in `step`, or not trained, for `reason`.

    A trajectory that has a reason of its own keeps it. A group is closed with the first of its members: those that
    taught come before those that did not.
    """
    g, t, f = schema.groups.c, schema.trajectories.c, schema.feedback.c
    # Feedback first, then groups: the judging worker locks groups before trajectories, and so do we.
    of_group = and_(f.target_kind == "group", f.target_id.in_(groups))
    connection.execute(
        schema.feedback.update()
        .where(f.project == project, f.state == "applied", or_(f.trajectory_id.in_(trajectories), of_group))
        .values(state="used" if step else "unused", reason=reason, step=step)
    )
    connection.execute(
        schema.groups.update()
        .where(g.project == project, g.state.in_(("scored", "claimed")), g.id.in_(groups))
        .values(state="trained" if step else "discarded", reason=reason)
    )
    connection.execute(
        schema.trajectories.update()
        .where(t.project == project, t.id.in_(trajectories))
        .values(
            state="trained" if step else "excluded",
            trained_in_step=step,
            why_not_trained=reason
            and case((t.state == "rewarded", reason), else_=func.coalesce(t.why_not_trained, reason)),
        )
    )
