"""The dashboard's SQL for groups."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from migrations import schema
from proxy.dashboard.queries.newest import Place, RowPage, equal, newest
from proxy.recording.reason_store import WHY_NOT_TRAINED

MOST_MEMBERS = 1_000
"""Most attempts of a group that are read."""
MOST_FEEDBACK = 200
"""Most feedback on a group's attempts that is read."""

g, t, c = schema.groups.c, schema.trajectories.c, schema.completions.c
f, j, s = schema.feedback.c, schema.judgements.c, schema.step_trajectories.c

_LISTED = (
    *(g.id, g.policy, g.formed_by, g.state, g.reason, g.size, g.target_size, g.rewarded, g.reward_mean),
    *(g.reward_spread, g.step, g.compared_with, g.judge_waits, g.created_at, g.closed_at),
)
_MEMBER = (
    *(t.id, t.state, t.reward, t.reward_source, WHY_NOT_TRAINED, t.trained_in_step, t.task, t.split, t.completions),
    *(t.sampled_tokens, t.first_version, t.last_version, t.tail_completion_id, t.created_at),
)
_ANSWER = (c.trajectory_id, c.response, c.response_text, c.status, c.finish_reason, c.policy_version, c.redactions)


def groups(
    connection: Connection, project: str, policy: str | None, state: str | None, before: Place | None
) -> RowPage:
    """Return the newest groups."""
    filters = equal((g.policy, policy), (g.state, state))
    return newest(connection, schema.groups, _LISTED, [g.project == project], filters, before)


def sizes(connection: Connection, project: str, group_ids: Collection[str]) -> dict[str, int]:
    """Return the current number of members: an open group does not store it."""
    query = select(t.group_id, func.count()).where(t.project == project, t.group_id.in_(group_ids)).group_by(t.group_id)
    return {row[0]: row[1] for row in connection.execute(query)} if group_ids else {}


def group(connection: Connection, project: str, group_id: str) -> dict[str, Any] | None:
    """Return one group; None if the project has none with that id."""
    row = connection.execute(select(*_LISTED).where(g.project == project, g.id == group_id)).one_or_none()
    return None if row is None else dict(row._mapping)


def members(connection: Connection, project: str, group_id: str) -> list[dict[str, Any]]:
    """Return its attempts, unordered, at most MOST_MEMBERS."""
    query = select(*_MEMBER).where(t.project == project, t.group_id == group_id)
    return [dict(row._mapping) for row in connection.execute(query.limit(MOST_MEMBERS))]


def answers(connection: Connection, project: str, tails: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the last answers of attempts, by trajectory. `tails`: their last completions."""
    query = select(*_ANSWER).where(c.project == project, c.id.in_(tails))
    return {row.trajectory_id: dict(row._mapping) for row in connection.execute(query)} if tails else {}


def turns(
    connection: Connection, project: str, trajectory_ids: Collection[str], most: int
) -> dict[str, list[dict[str, Any]]]:
    """Return the first `most` turns of attempts, by trajectory: what was new in each request, and the answer."""
    query = (
        select(*_ANSWER, c.id, c.turn, c.new_messages)
        .where(c.project == project, c.trajectory_id.in_(trajectory_ids), c.turn < most)
        .order_by(c.trajectory_id, c.turn)
    )
    by_trajectory: dict[str, list[dict[str, Any]]] = {}
    for row in connection.execute(query) if trajectory_ids else ():
        by_trajectory.setdefault(row.trajectory_id, []).append(dict(row._mapping))
    return by_trajectory


def prompt(connection: Connection, project: str, trajectory_id: str) -> list[Any]:
    """Return the messages that an attempt began with."""
    query = select(c.new_messages).where(c.project == project, c.trajectory_id == trajectory_id, c.turn == 0)
    return connection.execute(query).scalar() or []


def advantages(
    connection: Connection, project: str, policies: Collection[str], trajectory_ids: Collection[str]
) -> list[dict[str, Any]]:
    """Return the steps' data on attempts: advantage, baseline, staleness."""
    query = (
        select(
            s.trajectory_id, s.policy, s.reward, s.advantage, s.baseline, s.staleness, s.step_id, schema.steps.c.number
        )
        .join(schema.steps, (schema.steps.c.project == s.project) & (schema.steps.c.id == s.step_id))
        .where(s.project == project, s.policy.in_(policies), s.trajectory_id.in_(trajectory_ids))
    )
    return [dict(row._mapping) for row in connection.execute(query)] if trajectory_ids else []


def judgements(connection: Connection, project: str, group_id: str) -> list[dict[str, Any]]:
    """Return the judgements of a group, the latest first, with their rubrics."""
    r = schema.rubrics.c
    query = (
        select(j.id, j.judge, j.model, j.purpose, j.state, j.scores, j.error, j.cost_usd, j.prompt_tokens)
        .add_columns(j.completion_tokens, j.left_out, j.seconds, j.created_at, j.accepted_at, j.rubric_hash)
        .add_columns(r.text.label("rubric"))
        .join(schema.rubrics, (r.project == j.project) & (r.id == j.rubric_hash), isouter=True)
        .where(j.project == project, j.group_id == group_id)
        .order_by(j.created_at.desc(), j.place)
        .limit(50)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def scores_of(judged: Sequence[Mapping[str, Any]], trajectory_id: str) -> list[dict[str, Any]]:
    """Return the judges' scores of an attempt, in the order of the judgements of its group, without rejected ones."""
    scored = [(one, one["scores"].get(trajectory_id)) for one in judged if one["state"] == "accepted" and one["scores"]]
    return [
        {
            **one,
            "score": entry.get("score"),
            "explanation": str(entry.get("explanation") or ""),
            "parts": entry.get("parts"),
        }
        for one, entry in scored
        if isinstance(entry, Mapping)
    ]


def feedback_on(connection: Connection, project: str, trajectory_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the feedback on attempts, the latest first."""
    query = (
        select(f.id, f.trajectory_id, f.completion_id, f.reward, f.rewards, f.parts, f.source, f.comment, f.state)
        .add_columns(f.reason, f.step, f.demonstration, f.metadata, f.created_at, f.withdrawn_at)
        .where(f.project == project, f.trajectory_id.in_(trajectory_ids))
        .order_by(f.created_at.desc(), f.id.desc())
        .limit(MOST_FEEDBACK)
    )
    return [dict(row._mapping) for row in connection.execute(query)] if trajectory_ids else []
