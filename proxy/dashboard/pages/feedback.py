"""The pages of feedback: its content, and its outcome; and the review queue, the attempts that wait for a person.

A review is feedback like any app's: the same code reads, checks, redacts and commits it.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import ActionResult, FormRequest, PageRequest
from proxy.dashboard.pages import ratings
from proxy.dashboard.queries import counts as store_counts
from proxy.dashboard.queries import feedback as store_feedback
from proxy.dashboard.queries.newest import read_place
from proxy.dashboard.views import funnel
from proxy.dashboard.views.message_view import excerpt
from proxy.errors import BadRequest, NotFound
from proxy.recording.store import REVIEWS_AT_ONCE
from whetstone.domain.ids import ID
from whetstone.domain.states import FeedbackState

SOURCES = ("reward", "thumbs", "parts", "demonstration", "comment", "judge", "end", "close")
COUNTED = timedelta(days=7)


def feedback(request: PageRequest) -> Mapping[str, Any]:
    """Load the newest feedback, with the state of its trajectory."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, "state", "source")
    page = store_feedback.feedback(
        at, project, filters.get("state"), filters.get("source"), read_place(request.query.get("before"))
    )
    counts = store_counts.feedback_states(at, project, request.now - COUNTED)
    return {
        "page": page,
        **_outcomes(request, page.rows),
        "filters": filters,
        "states": tuple(FeedbackState),
        "sources": SOURCES,
        "counts": {state: counts[state] for state in FeedbackState if state in counts},
        "at": lambda **changed: pagination.href("/ui/feedback", {**filters, **changed}),
        **pagination.pages("/ui/feedback", request.query, filters, page),
    }


def one_feedback(request: PageRequest) -> Mapping[str, Any]:
    """Load one feedback."""
    feedback_id = request.path["feedback_id"]
    row = store_feedback.by_id(request.connection, request.project, feedback_id) if ID.fullmatch(feedback_id) else None
    if row is None:
        raise NotFound(f"there is no feedback {feedback_id[:200]!r} in this project")
    return {**_outcomes(request, [row]), "one": row}


def _outcomes(request: PageRequest, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of the trajectories that these rows of feedback refer to, and what their reasons mean."""
    ids = {row["trajectory_id"] for row in rows} - {None}
    standing = store_feedback.standing(request.connection, request.project, ids)
    meanings = {name: funnel.meaning_of(row["why_not_trained"]) for name, row in standing.items()}
    return {"standing": standing, "meanings": meanings}


def reviews(request: PageRequest) -> Mapping[str, Any]:
    """Load the queue, the longest waiting first."""
    rows = store_feedback.waiting_for_review(request.connection, request.project)
    group_ids = {row["group_id"] for row in rows} - {None}
    scores = store_feedback.explanations(request.connection, request.project, group_ids)
    return {
        "rows": [{**row, **excerpt(row), "scores": scores.get(row["trajectory_id"], [])} for row in rows],
        "at_once": REVIEWS_AT_ONCE,
    }


async def review(request: FormRequest) -> ActionResult:
    """Store the review of one attempt.

    Raises:
        BadRequest: the form has no reward, or an invalid one.
        NotRecorded: the feedback could not be stored.
    """
    body: dict[str, Any] = {"trajectory_id": request.path["trajectory_id"]}
    if request.form.get("thumbs") in ("up", "down"):
        body["thumbs"] = request.form["thumbs"]
    else:
        body["reward"] = _reward(request.form.get("reward", ""))
    if comment := request.form.get("comment", "").strip():
        body["comment"] = comment
    (feedback_id,) = await ratings.save(request, body)
    summary = f"thumbs {body['thumbs']}" if "thumbs" in body else f"reward {body['reward']:g}"
    return ActionResult(f"Saved: {summary} for {body['trajectory_id']} (feedback {feedback_id}).")


def _reward(text: str) -> float:
    try:
        reward = float(text.strip().replace(",", ".").replace("−", "-"))
    except ValueError as error:
        raise BadRequest("choose thumbs up or down, or enter a reward: a number such as 0.5", param="reward") from error
    if not math.isfinite(reward):
        raise BadRequest("a reward must be a finite number", param="reward")
    return reward
