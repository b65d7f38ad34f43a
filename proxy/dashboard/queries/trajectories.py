"""The dashboard's SQL for trajectories: the search (a record by its id, trajectories by their properties, answers by
their text), and one trajectory with its turns and the trajectories before and after it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, select

from migrations import schema
from migrations.words import response_text
from proxy.dashboard.queries.newest import Place, RowPage, newest
from proxy.recording.reason_store import TRAJECTORY, WHY_NOT_TRAINED, is_for

t, c, g, f, p = schema.trajectories.c, schema.completions.c, schema.groups.c, schema.feedback.c, schema.policies.c

_LISTED = (
    *(t.id, t.group_id, t.policy, t.task, t.split, t.state, t.reward, t.reward_source, t.first_version),
    *(t.last_version, t.completions, t.sampled_tokens, WHY_NOT_TRAINED, t.trained_in_step, t.metadata, t.end_user),
    *(t.tail_completion_id, t.created_at),
)
_ANSWER = (
    *(c.id, c.trajectory_id, c.turn, c.policy, c.policy_version, c.status, c.finish_reason, c.completion_tokens),
    *(response_text, c.created_at),
)
_TURN = (
    *(c.id, c.trajectory_id, c.upstream_id, c.choice, c.turn, c.policy, c.policy_version, c.endpoint, c.status),
    *(c.error, c.follows, c.key_id, c.end_user, c.new_messages, c.tools, c.response, c.response_text, c.token_ids),
    *(c.inference_logprobs, c.sampling, c.finish_reason, c.prompt_tokens, c.completion_tokens, c.ttft_ms, c.total_ms),
    *(c.retry_of, c.threaded_by, c.why_not_trained, c.redactions, c.created_at),
)
_CONDITIONS: dict[str, Callable[[Any], ColumnElement[bool]]] = {
    "policy": lambda name: t.policy == name,
    "version": lambda version: (t.first_version <= version) & (t.last_version >= version),
    "task": lambda task: t.task == task,
    "split": lambda split: t.split == split,
    "state": lambda state: t.state == state,
    "why": is_for,
    "user": lambda user: t.end_user == user,
    "from": lambda reward: t.reward >= reward,
    "to": lambda reward: t.reward <= reward,
}
"""Criterion -> the condition on a trajectory. `since`, `until`, `text` and `metadata` are conditions of their own."""
_BOOLEANS = {"true": "1", "false": "0"}
"""As SQLite reads them out of JSON."""


def matches(connection: Connection, project: str, criteria: Mapping[str, Any], before: Place | None) -> RowPage:
    """Return the trajectories that match, the newest first."""
    within = [t.project == project, *_between(t.created_at, criteria)]
    return newest(connection, schema.trajectories, _LISTED, within, _conditions(connection, criteria), before)


def answers(connection: Connection, project: str, criteria: Mapping[str, Any], before: Place | None) -> RowPage:
    """Return the completions that contain `text`, of trajectories that match, the newest first."""
    within = [c.project == project, *_between(c.created_at, criteria)]
    own = {"policy": c.policy, "version": c.policy_version}
    filters = [response_text.icontains(criteria["text"], autoescape=True)]
    filters += [column == criteria[name] for name, column in own.items() if name in criteria]
    if of_trajectory := _conditions(connection, criteria):
        its_own = (t.project == c.project, t.id == c.trajectory_id)
        filters.append(select(t.id).where(*its_own, *of_trajectory).correlate(schema.completions).exists())
    return newest(connection, schema.completions, _ANSWER, within, filters, before)


def by_id(connection: Connection, project: str, name: str) -> list[dict[str, Any]]:
    """Return everything with this id: trajectories, groups, completions (by our id, and by the app's), feedback."""
    completion = select(c.id, c.trajectory_id, c.turn, c.created_at).where(c.project == project)
    queries = (
        (
            "trajectory",
            select(t.id, t.id.label("trajectory_id"), t.created_at).where(t.project == project, t.id == name),
        ),
        ("group", select(g.id, g.created_at).where(g.project == project, g.id == name)),
        ("completion", completion.where(c.id == name)),
        ("completion", completion.where(c.upstream_id == name)),
        ("feedback", select(f.id, f.trajectory_id, f.created_at).where(f.project == project, f.id == name)),
    )
    return [
        {"kind": kind} | dict(row._mapping) for kind, query in queries for row in connection.execute(query.limit(20))
    ]


def trajectory(connection: Connection, project: str, trajectory_id: str) -> dict[str, Any] | None:
    """Return one trajectory; None if the project has none with that id."""
    row = connection.execute(TRAJECTORY.where(t.project == project, t.id == trajectory_id)).one_or_none()
    return None if row is None else dict(row._mapping)


def turns(connection: Connection, project: str, trajectory_id: str, start: int, end: int) -> list[dict[str, Any]]:
    """Return its completions from turn `start` to before `end`."""
    query = (
        select(*_TURN)
        .where(c.project == project, c.trajectory_id == trajectory_id, c.turn >= start, c.turn < end)
        .order_by(c.turn)
    )
    return [dict(row._mapping) for row in connection.execute(query)]


def turn_of(connection: Connection, project: str, completion_ids: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the trajectory and the turn of completions, by their id."""
    query = select(c.id, c.trajectory_id, c.turn).where(c.project == project, c.id.in_(completion_ids))
    return {row.id: (row.trajectory_id, row.turn) for row in connection.execute(query)} if completion_ids else {}


def continued_in(connection: Connection, project: str, completion_ids: Collection[str]) -> list[tuple[str, str]]:
    """Return completion and trajectory, for each trajectory that continues one of these completions."""
    query = select(t.continues, t.id).where(t.project == project, t.continues.in_(completion_ids)).limit(20)
    return [(row.continues, row.id) for row in connection.execute(query)] if completion_ids else []


def model_paths(connection: Connection, project: str, policies: Collection[str]) -> dict[str, str]:
    """Return the path of each policy's base model; policies that another server answers are left out."""
    query = select(p.id, p.model_path).where(p.project == project, p.id.in_(policies), p.upstream.is_(None))
    return {row.id: row.model_path for row in connection.execute(query)}


def policy_names(connection: Connection, project: str) -> list[str]:
    """Return all policies of the project."""
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())


def _between(created_at: ColumnElement[Any], criteria: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    since = [created_at >= criteria["since"]] if "since" in criteria else []
    until = [created_at < criteria["until"]] if "until" in criteria else []
    return since + until


def _conditions(connection: Connection, criteria: Mapping[str, Any]) -> list[ColumnElement[bool]]:
    conditions = [condition(criteria[name]) for name, condition in _CONDITIONS.items() if name in criteria]
    if "metadata" in criteria:
        key, value = criteria["metadata"]
        is_number = connection.dialect.name == "sqlite" and value in _BOOLEANS
        values = [value, _BOOLEANS[value]] if is_number else [value]
        conditions.append(cast(t.metadata[key].as_string(), Text).in_(values))
    return conditions
