"""The dashboard's SQL for search: a record by its id, trajectories by their properties, answers by their text."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, select

from migrations import schema
from migrations.words import response_text
from proxy.dashboard.queries.newest import Place, RowPage, equal, newest
from proxy.recording.reason_store import WHY_NOT_TRAINED, is_for

t, c, g, f = schema.trajectories.c, schema.completions.c, schema.groups.c, schema.feedback.c

_TRAJECTORY_COLUMNS = (
    *(t.id, t.group_id, t.policy, t.task, t.split, t.state, t.reward, t.reward_source, t.first_version),
    *(t.last_version, t.completions, t.sampled_tokens, WHY_NOT_TRAINED, t.trained_in_step, t.metadata, t.end_user),
    t.created_at,
)
_ANSWER_COLUMNS = (
    *(c.id, c.trajectory_id, c.turn, c.policy, c.policy_version, c.status, c.finish_reason, c.completion_tokens),
    *(response_text, c.created_at),
)
_BOOLEANS = {"true": "1", "false": "0"}
"""As SQLite reads them out of JSON."""


@dataclass(frozen=True, slots=True)
class SearchCriteria:
    """Filters for trajectories; None matches everything."""

    policy: str | None = None
    version: int | None = None
    task: str | None = None
    split: str | None = None
    state: str | None = None
    why_not_trained: str | None = None
    end_user: str | None = None
    metadata: tuple[str, str] | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None


def trajectories(connection: Connection, project: str, criteria: SearchCriteria, before: Place | None) -> RowPage:
    """Return the trajectories that match, the newest first."""
    within = [t.project == project, *_between(t.created_at, criteria)]
    filters = _filters(criteria, connection.dialect.name)
    return newest(connection, schema.trajectories, _TRAJECTORY_COLUMNS, within, filters, before)


def answers(connection: Connection, project: str, criteria: SearchCriteria, before: Place | None) -> RowPage:
    """Return the completions that contain `text`, of trajectories that match, the newest first."""
    within = [c.project == project, *_between(c.created_at, criteria)]
    filters = [response_text.icontains(criteria.text or "", autoescape=True)]
    if criteria.policy is not None:
        filters.append(c.policy == criteria.policy)
    if criteria.version is not None:
        filters.append(c.policy_version == criteria.version)
    if of_trajectory := _filters(criteria, connection.dialect.name):
        its_own = (t.project == c.project, t.id == c.trajectory_id)
        filters.append(select(t.id).where(*its_own, *of_trajectory).correlate(schema.completions).exists())
    return newest(connection, schema.completions, _ANSWER_COLUMNS, within, filters, before)


def by_id(connection: Connection, project: str, name: str) -> list[dict[str, Any]]:
    """Return everything with this id: trajectories, groups, completions (by our id, and by the app's), feedback."""
    records: list[dict[str, Any]] = []
    queries = (
        (
            "trajectory",
            select(t.id, t.id.label("trajectory_id"), t.created_at).where(t.project == project, t.id == name),
        ),
        ("group", select(g.id, g.created_at).where(g.project == project, g.id == name)),
        ("completion", select(c.id, c.trajectory_id, c.turn, c.created_at).where(c.project == project, c.id == name)),
        (
            "completion",
            select(c.id, c.trajectory_id, c.turn, c.created_at).where(c.project == project, c.upstream_id == name),
        ),
        ("feedback", select(f.id, f.trajectory_id, f.created_at).where(f.project == project, f.id == name)),
    )
    for kind, query in queries:
        records += [{"kind": kind} | dict(row._mapping) for row in connection.execute(query.limit(20))]
    return records


def _between(created_at: Any, criteria: SearchCriteria) -> list[ColumnElement[bool]]:
    within: list[ColumnElement[bool]] = []
    if criteria.since is not None:
        within.append(created_at >= criteria.since)
    if criteria.until is not None:
        within.append(created_at < criteria.until)
    return within


def _filters(criteria: SearchCriteria, dialect: str) -> list[ColumnElement[bool]]:
    filters = equal(
        (t.policy, criteria.policy),
        (t.task, criteria.task),
        (t.split, criteria.split),
        (t.state, criteria.state),
        (t.end_user, criteria.end_user),
    )
    if criteria.version is not None:
        filters += [t.first_version <= criteria.version, t.last_version >= criteria.version]
    if criteria.why_not_trained is not None:
        filters.append(is_for(criteria.why_not_trained))
    if criteria.reward_from is not None:
        filters.append(t.reward >= criteria.reward_from)
    if criteria.reward_to is not None:
        filters.append(t.reward <= criteria.reward_to)
    if criteria.metadata is not None:
        key, value = criteria.metadata
        text = cast(t.metadata[key].as_string(), Text)
        values = [value] if dialect == "postgresql" or value not in _BOOLEANS else [value, _BOOLEANS[value]]
        filters.append(text.in_(values))
    return filters
