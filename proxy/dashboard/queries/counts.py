"""The dashboard's SQL for counts, from the roll-ups: trajectories by reason, tokens and money by key.

A bucket of a roll-up may have several rows, some of them negative: read only sums.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, column, func, select, table

from migrations import schema
from whetstone.domain.ids import IMPORTED_LOG

th = table(
    "admin_trajectory_hours",
    *(column(name) for name in ("project", "policy", "hour", "state", "why_not_trained", "trajectories")),
).c
ch = table(
    "admin_completion_hours",
    *(column(name) for name in ("project", "hour", "day", "policy", "key_id", "status")),
    *(column(name) for name in ("completions", "prompt_tokens", "sampled_tokens")),
).c
fh = table(
    "admin_feedback_hours",
    *(column(name) for name in ("project", "hour", "state", "feedback")),
).c
p = schema.policies.c
d, j, g, t = schema.judge_days.c, schema.judgements.c, schema.groups.c, schema.trajectories.c

NEWEST_JUDGEMENTS = 200
"""Judgements that are read to compute the cost of judging each task."""


def reasons(
    connection: Connection, project: str, policies: Sequence[str], since: datetime | None
) -> list[tuple[str, str, str | None, int]]:
    """Return policy, state, reason and number of the trajectories that began since `since`."""
    count = func.sum(th.trajectories)
    query = (
        select(th.policy, th.state, th.why_not_trained, count)
        .where(th.project == project, th.policy.in_(policies), *_since(th.hour, since))
        .group_by(th.policy, th.state, th.why_not_trained)
        .having(count > 0)
    )
    return [(row[0], row[1], row[2], int(row[3])) for row in connection.execute(query)]


def usage(
    connection: Connection, project: str, by: Literal["key_id", "day"], since: datetime | None
) -> list[dict[str, Any]]:
    """Return the completions and tokens that apps used since `since`, by a column and in its order; under the key None:
    usage without a key. An imported log is not usage."""
    logs = select(p.id).where(p.project == project, p.upstream == IMPORTED_LOG)
    sums = {name: func.sum(ch[name]) for name in ("completions", "prompt_tokens", "sampled_tokens")}
    query = (
        select(ch[by], *(total.label(name) for name, total in sums.items()))
        .where(ch.project == project, ch.policy.not_in(logs), *_since(ch.hour, since))
        .group_by(ch[by])
        .having(sums["completions"] > 0)
        .order_by(ch[by])
    )
    return [{**row._mapping, **{name: int(row._mapping[name]) for name in sums}} for row in connection.execute(query)]


def feedback_states(connection: Connection, project: str, since: datetime) -> dict[str, int]:
    """Return the number of the feedback since `since`, by state."""
    count = func.sum(fh.feedback)
    query = select(fh.state, count).where(fh.project == project, *_since(fh.hour, since)).group_by(fh.state)
    return {state: int(number) for state, number in connection.execute(query.having(count > 0))}


def judge_days(connection: Connection, project: str, since: datetime | None) -> list[dict[str, Any]]:
    """Return the cost of judging each day, by policy and judge, the newest first."""
    query = (
        select(d.day, d.policy, d.judge, d.calls, d.refused, d.failed, d.tokens, d.cost_usd)
        .where(d.project == project, *_since(d.day, since, "%Y-%m-%d"))
        .order_by(d.day.desc(), d.policy, d.judge)
        .limit(400)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def judged(connection: Connection, project: str, since: datetime | None) -> tuple[int, float]:
    """Return the number of calls and the cost of all judging since `since`."""
    sums = select(func.sum(d.calls), func.sum(d.cost_usd)).where(d.project == project)
    calls, cost = connection.execute(sums.where(*_since(d.day, since, "%Y-%m-%d"))).one()
    return int(calls or 0), float(cost or 0.0)


def judged_by_task(connection: Connection, project: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the cost of the newest judgements, by policy and the task of their group's attempts."""
    totals: dict[tuple[str, str | None], dict[str, Any]] = {}
    for policy in policies:
        newest = (
            select(j.group_id, j.cost_usd, j.prompt_tokens, j.completion_tokens)
            .where(j.project == project, j.policy == policy, j.accepted_at.is_not(None))
            .order_by(j.accepted_at.desc())
            .limit(NEWEST_JUDGEMENTS)
        )
        judgements = list(connection.execute(newest))
        tasks = _tasks(connection, project, sorted({row.group_id for row in judgements}))
        for row in judgements:
            key = (policy, tasks.get(row.group_id))
            empty = {"policy": policy, "task": key[1], "judgements": 0, "tokens": 0, "cost_usd": 0.0, "unpriced": 0}
            total = totals.setdefault(key, empty)
            total["judgements"] += 1
            total["tokens"] += row.prompt_tokens + row.completion_tokens
            total["cost_usd"] += row.cost_usd or 0.0
            total["unpriced"] += row.cost_usd is None
    return sorted(totals.values(), key=lambda one: (-one["cost_usd"], -one["tokens"]))


def _tasks(connection: Connection, project: str, group_ids: Sequence[str]) -> dict[str, str | None]:
    """Return the task of each group: its attempts' task, which is the same for all if the app tags them well."""
    query = (
        select(t.group_id, func.min(t.task)).where(t.project == project, t.group_id.in_(group_ids)).group_by(t.group_id)
    )
    return {row[0]: row[1] for row in connection.execute(query)} if group_ids else {}


def _since(
    moment: ColumnElement[Any], since: datetime | None, form: str = "%Y-%m-%d %H:00"
) -> list[ColumnElement[bool]]:
    return [] if since is None else [moment >= f"{since:{form}}"]
