"""The dashboard's SQL for search: a record by its id, trajectories by their properties, answers by their text."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, select

from migrations import schema
from migrations.words import response_text
from proxy.dashboard.queries.newest import Found, Place, newest
from proxy.recording.reason_store import WHY_NOT_TRAINED, is_for

t, c, g, f = schema.trajectories.c, schema.completions.c, schema.groups.c, schema.feedback.c

_LISTED = (
    *(t.id, t.group_id, t.policy, t.task, t.split, t.state, t.reward, t.reward_source, t.first_version),
    *(t.last_version, t.completions, t.sampled_tokens, WHY_NOT_TRAINED, t.trained_in_step, t.metadata, t.end_user),
    t.created_at,
)
_SAID = (
    *(c.id, c.trajectory_id, c.turn, c.policy, c.policy_version, c.status, c.finish_reason, c.completion_tokens),
    *(response_text, c.created_at),
)
_BOOLEANS = {"true": "1", "false": "0"}
"""As SQLite reads them out of JSON."""


@dataclass(frozen=True, slots=True)
class Wanted:
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


def trajectories(connection: Connection, project: str, wanted: Wanted, before: Place | None) -> Found:
    """Return the trajectories that match, the newest first."""
    within = [t.project == project, *_between(t.created_at, wanted)]
    kept = _kept(wanted, connection.dialect.name)
    return newest(connection, schema.trajectories, _LISTED, within, kept, before)


def answers(connection: Connection, project: str, wanted: Wanted, before: Place | None) -> Found:
    """Return the completions that contain `text`, of trajectories that match, the newest first."""
    within = [c.project == project, *_between(c.created_at, wanted)]
    kept = [response_text.icontains(wanted.text or "", autoescape=True)]
    if wanted.policy is not None:
        kept.append(c.policy == wanted.policy)
    if wanted.version is not None:
        kept.append(c.policy_version == wanted.version)
    if of_trajectory := _kept(wanted, connection.dialect.name):
        its_own = (t.project == c.project, t.id == c.trajectory_id)
        kept.append(select(t.id).where(*its_own, *of_trajectory).correlate(schema.completions).exists())
    return newest(connection, schema.completions, _SAID, within, kept, before)


def by_id(connection: Connection, project: str, name: str) -> list[dict[str, Any]]:
    """Return everything with this id: trajectories, groups, completions (by our id, and by the app's), feedback."""
    found: list[dict[str, Any]] = []
    looks = (
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
    for kind, query in looks:
        found += [{"kind": kind} | dict(row._mapping) for row in connection.execute(query.limit(20))]
    return found


def _between(created_at: Any, wanted: Wanted) -> list[ColumnElement[bool]]:
    within: list[ColumnElement[bool]] = []
    if wanted.since is not None:
        within.append(created_at >= wanted.since)
    if wanted.until is not None:
        within.append(created_at < wanted.until)
    return within


def _kept(wanted: Wanted, dialect: str) -> list[ColumnElement[bool]]:
    equal = (
        (t.policy, wanted.policy),
        (t.task, wanted.task),
        (t.split, wanted.split),
        (t.state, wanted.state),
        (t.end_user, wanted.end_user),
    )
    kept: list[ColumnElement[bool]] = [column == value for column, value in equal if value is not None]
    if wanted.version is not None:
        kept += [t.first_version <= wanted.version, t.last_version >= wanted.version]
    if wanted.why_not_trained is not None:
        kept.append(is_for(wanted.why_not_trained))
    if wanted.reward_from is not None:
        kept.append(t.reward >= wanted.reward_from)
    if wanted.reward_to is not None:
        kept.append(t.reward <= wanted.reward_to)
    if wanted.metadata is not None:
        key, value = wanted.metadata
        told = cast(t.metadata[key].as_string(), Text)
        values = [value] if dialect == "postgresql" or value not in _BOOLEANS else [value, _BOOLEANS[value]]
        kept.append(told.in_(values))
    return kept
