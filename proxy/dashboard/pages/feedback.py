"""The pages of feedback: its content, and its outcome."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import Action, Page, PageRequest
from proxy.dashboard.queries import counts as store_counts
from proxy.dashboard.queries import feedback as store_feedback
from proxy.dashboard.queries.newest import RowPage, read_place
from proxy.dashboard.views import funnel
from proxy.errors import NotFound
from whetstone.domain.ids import ID
from whetstone.domain.states import FeedbackState

SOURCES = ("reward", "thumbs", "parts", "demonstration", "judge", "end", "close")
COUNTED = timedelta(days=7)


def feedback(request: PageRequest) -> Mapping[str, Any]:
    """Load the newest feedback, with the state of its trajectory."""
    at, project = request.connection, request.project
    filters = pagination.filters(request.query, "state", "source")
    page = store_feedback.feedback(
        at, project, filters.get("state"), filters.get("source"), read_place(request.query.get("before"))
    )
    since = request.now - COUNTED
    return {
        **_with_outcomes(request, page),
        "filters": filters,
        "states": tuple(FeedbackState),
        "sources": SOURCES,
        "counts": _by_state(store_counts.feedback_states(at, project, since)),
        "at": lambda **changed: pagination.href("/ui/feedback", {**filters, **changed}),
        **pagination.pages("/ui/feedback", request.query, filters, page),
    }


def one_feedback(request: PageRequest) -> Mapping[str, Any]:
    """Load one feedback."""
    feedback_id = request.path["feedback_id"]
    row = store_feedback.by_id(request.connection, request.project, feedback_id) if ID.fullmatch(feedback_id) else None
    if row is None:
        raise NotFound(f"there is no feedback {feedback_id[:200]!r} in this project")
    return {**_with_outcomes(request, RowPage([row], None, 0, stopped=False)), "one": row}


def _with_outcomes(request: PageRequest, page: RowPage) -> dict[str, Any]:
    ids = {row["trajectory_id"] for row in page.rows} - {None}
    standing = store_feedback.standing(request.connection, request.project, ids)
    meanings = {name: funnel.meaning_of(row["why_not_trained"]) for name, row in standing.items()}
    return {"page": page, "standing": standing, "meanings": meanings}


def _by_state(counts: list[tuple[str, str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for _, state, count in counts:
        totals[state] = totals.get(state, 0) + count
    return {state: totals[state] for state in FeedbackState if state in totals}


PAGES = [
    Page("/ui/feedback", "feedback.html", feedback, nav="/ui/feedback"),
    Page("/ui/feedback/{feedback_id}", "feedback_one.html", one_feedback, nav="/ui/feedback"),
]
ACTIONS: list[Action] = []
