"""The dashboard's SQL for ratings: attempts that may be rated, what was reported about them, and the ratings of people.

A rating is feedback whose metadata has `rater`, the name of the person; the dashboard's forms store it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Text, bindparam, cast, select, text

from migrations import schema
from proxy.dashboard.queries.newest import RowPage, equal, newest
from whetstone.database.types import Json
from whetstone.domain.states import FeedbackState, TrajectoryStatus

CANDIDATES = 200
"""Most attempts that the queue is chosen from, the newest."""
CANDIDATES_S = 0.04
"""How long to look for them."""
MOST_OPINIONS = 5_000
"""Most feedback on them that is read, the latest."""
MOST_JUDGEMENTS = 300
MOST_RATINGS = 5_000
"""Most ratings that agreement is computed from, the latest."""
RATEABLE = (TrajectoryStatus.OPEN, TrajectoryStatus.ENDED, TrajectoryStatus.REWARDED)
"""States in which a rating may still become the reward of training."""

f, j, t = schema.feedback.c, schema.judgements.c, schema.trajectories.c

rater_name = cast(f.metadata["rater"].as_string(), Text)
_CANDIDATE = (
    *(t.id, t.group_id, t.policy, t.task, t.split, t.state, t.reward, t.reward_source, t.tail_completion_id),
    t.created_at,
)
_RATING = (
    *(f.id, f.target_kind, f.target_id, f.trajectory_id, f.completion_id, f.reward, f.source, f.comment, f.metadata),
    *(f.key_id, f.state, f.created_at),
)
_STANDS = (f.withdrawn_at.is_(None), f.state.not_in((FeedbackState.WITHDRAWN, FeedbackState.FAILED)))
_CONVERSATIONS = text("""
    SELECT c.id, c.response,
           (SELECT v.messages FROM admin_conversations AS v
            WHERE v.project = c.project AND v.completion_id = c.id) AS messages
    FROM completions AS c
    WHERE c.project = :project AND c.id IN :ids
""").columns(messages=Json, response=Json)


def candidates(connection: Connection, project: str, filters: Mapping[str, str]) -> RowPage:
    """Return the newest attempts that may be rated. `filters`: policy, task and split, where they are chosen."""
    chosen = equal(*((t[name], filters.get(name)) for name in ("policy", "task", "split")))
    rateable = [t.state.in_(RATEABLE), t.tail_completion_id.is_not(None), *chosen]
    return newest(
        connection, schema.trajectories, _CANDIDATE, [t.project == project], rateable, None, CANDIDATES, CANDIDATES_S
    )


def feedback_about(connection: Connection, project: str, trajectory_ids: Collection[str]) -> list[dict[str, Any]]:
    """Return the feedback on these attempts that has a number, the latest first; also what is not applied yet."""
    query = (
        select(*_RATING)
        .where(f.project == project, f.reward.is_not(None), *_STANDS)
        .order_by(f.created_at.desc(), f.id.desc())
        .limit(MOST_OPINIONS)
    )
    # Two queries: each has its index.
    both = [query.where(f.trajectory_id.in_(trajectory_ids)), query.where(*_not_applied("trajectory", trajectory_ids))]
    return [dict(row._mapping) for one in both for row in connection.execute(one)] if trajectory_ids else []


def judged(connection: Connection, project: str, group_ids: Collection[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the judgements of these groups that count for the reward, the latest first: judge, and scores by
    trajectory."""
    accepted = (j.state == "accepted", j.purpose == "reward", j.scores.is_not(None))
    query = (
        select(j.judge, j.scores)
        .where(j.project == project, j.group_id.in_(group_ids), *accepted)
        .order_by(j.accepted_at.desc(), j.id)
        .limit(MOST_JUDGEMENTS)
    )
    return [(row.judge, row.scores) for row in connection.execute(query)] if group_ids else []


def conversations(connection: Connection, project: str, completion_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return `messages` and `response` of these completions, by id."""
    query = _CONVERSATIONS.bindparams(bindparam("ids", expanding=True))
    rows = connection.execute(query, {"project": project, "ids": list(completion_ids)}) if completion_ids else ()
    return {row.id: dict(row._mapping) for row in rows}


def own(
    connection: Connection, project: str, rater: str, trajectory_ids: Collection[str], completion_ids: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return the last rating that a rater gave each of these attempts and answers, by the id of its target."""
    query = select(*_RATING).where(f.project == project, rater_name == rater, *_STANDS)
    queries = [query.where(f.trajectory_id.in_(trajectory_ids))] if trajectory_ids else []
    for kind, ids in (("trajectory", trajectory_ids), ("completion", completion_ids)):
        if ids:
            queries.append(query.where(*_not_applied(kind, ids)))
    rows = [dict(row._mapping) for one in queries for row in connection.execute(one)]
    return {row["target_id"]: row for row in sorted(rows, key=lambda row: (row["created_at"], row["id"]))}


def newest_ratings(connection: Connection, project: str) -> RowPage:
    """Return the latest ratings of all raters."""
    within, filters = [f.project == project], [rater_name.is_not(None), f.reward.is_not(None), *_STANDS]
    return newest(connection, schema.feedback, _RATING, within, filters, None, MOST_RATINGS)


def _not_applied(kind: str, ids: Collection[str]) -> tuple[Any, ...]:
    waits = (f.trajectory_id.is_(None), f.state == FeedbackState.WAITING, f.target_kind == kind)
    return (*waits, f.target_id.in_(ids))
