"""SQL of handovers that the programs share: begin one, change its share, and read what it has saved.

The share is in the policy's row, and each change of it is a decision of the test `handover`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, column, func, select, table

from migrations import schema
from whetstone.config.rewards import HandoverSettings
from whetstone.config.spending import Prices
from whetstone.registry.versions import decide, live_version

TEST = "handover"

p, g = schema.policies.c, schema.gate_results.c
h = table(
    "admin_completion_hours",
    *map(column, ("project", "hour", "policy", "status", "completions", "prompt_tokens", "sampled_tokens")),
).c


@dataclass(frozen=True)
class HandoverState:
    """How far a handover is."""

    teacher: str
    share: float
    since: datetime
    """Since when the policy answers this share."""
    live_version: int


@dataclass(frozen=True)
class LastDecision:
    """The last decision on the share."""

    decision: str
    reason: str | None
    figures: dict[str, Any] | None
    created_at: datetime


@dataclass(frozen=True)
class Savings:
    """What the policy has answered in its teacher's place since the handover began."""

    answers: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None
    """At the teacher's prices; None where the settings have none."""


def read_handover(connection: Connection, project: str, policy: str) -> HandoverState | None:
    """Return how far a policy's handover is; None without one."""
    columns = (p.handover_teacher, p.handover_share, p.handover_since, p.live_version)
    query = select(*columns).where(p.project == project, p.id == policy, p.handover_teacher.is_not(None))
    row = connection.execute(query).one_or_none()
    return None if row is None else HandoverState(*row)


def prepare_handover(
    connection: Connection, project: str, policy: str, settings: HandoverSettings | None, now: datetime
) -> None:
    """Begin the policy's handover if the settings have a new one, end it if they have none.

    One that goes on keeps its share; if that is not among `shares` any more, it gets the next lower one.
    """
    before = read_handover(connection, project, policy)
    if settings is None:
        if before is not None:
            _write(connection, project, policy, teacher=None, share=None, since=None)
        return
    first = settings.shares[0]
    if before is None or before.teacher != settings.teacher:
        _write(connection, project, policy, teacher=settings.teacher, share=first, since=now)
        reason = f"{settings.teacher} answers; {policy} begins with {first:.0%} of new trajectories"
        version = live_version(connection, project, policy)
        figures = {"share": first}
        decide(
            connection, project, policy, version, test=TEST, decision="begin", now=now, reason=reason, figures=figures
        )
    elif before.share not in settings.shares:
        share = max((share for share in settings.shares if share < before.share), default=first)
        _write(connection, project, policy, teacher=settings.teacher, share=share, since=now)


def decide_handover(
    connection: Connection,
    project: str,
    policy: str,
    state: HandoverState,
    decision: Literal["raise", "lower", "stay", "testing"],
    share: float,
    reason: str,
    figures: Mapping[str, Any],
    now: datetime,
) -> None:
    """Record a decision; unless it is `testing`, the policy answers `share` from now on, and rewards count from now."""
    if decision != "testing":
        _write(connection, project, policy, teacher=state.teacher, share=share, since=now)
    decide(
        connection,
        project,
        policy,
        state.live_version,
        test=TEST,
        decision=decision,
        now=now,
        reason=reason,
        figures={**figures, "share": share},
    )


def read_last_decision(connection: Connection, project: str, policy: str) -> LastDecision | None:
    """Return the last decision on a policy's share; None where there is none."""
    query = (
        select(g.decision, g.reason, g.figures, g.created_at)
        .where(g.project == project, g.policy == policy, g.test == TEST)
        .order_by(g.created_at.desc(), g.id.desc())
        .limit(1)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else LastDecision(*row)


def read_saved(connection: Connection, project: str, policy: str, prices: Prices | None) -> Savings:
    """Return what the policy has answered since the hour in which its handover began, from the roll-ups. `prices`: its
    teacher's."""
    of_test = (g.project == project, g.policy == policy, g.test == TEST, g.decision == "begin")
    began = connection.execute(select(func.max(g.created_at)).where(*of_test)).scalar_one()
    if began is None:
        return Savings(0, 0, 0, None)
    hour = f"{began:%Y-%m-%d %H:00}"
    sums = (func.coalesce(func.sum(h[name]), 0) for name in ("completions", "prompt_tokens", "sampled_tokens"))
    query = select(*sums).where(h.project == project, h.policy == policy, h.hour >= hour, h.status == "complete")
    answers, read, written = map(int, connection.execute(query).one())
    return Savings(answers, read, written, None if prices is None else prices.usd(read, written))


def _write(
    connection: Connection, project: str, policy: str, teacher: str | None, share: float | None, since: datetime | None
) -> None:
    values = {"handover_teacher": teacher, "handover_share": share, "handover_since": since}
    connection.execute(schema.policies.update().where(p.project == project, p.id == policy).values(values))
