"""The pages of feedback: its content, and its outcome."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import Action, Asked, Page
from proxy.dashboard.queries import counts as store_counts
from proxy.dashboard.queries import feedback as store_feedback
from proxy.dashboard.queries.newest import Found, read_place
from proxy.dashboard.views import funnel
from proxy.errors import NotFound
from whetstone.domain.ids import ID
from whetstone.domain.states import FeedbackState

SOURCES = ("reward", "thumbs", "parts", "demonstration", "judge", "end", "close")
COUNTED = timedelta(days=7)


def feedback(asked: Asked) -> Mapping[str, Any]:
    """Load the newest feedback, with the state of its trajectory."""
    at, project = asked.connection, asked.project
    kept = pagination.filters(asked.query, "state", "source")
    found = store_feedback.feedback(
        at, project, kept.get("state"), kept.get("source"), read_place(asked.query.get("before"))
    )
    since = asked.now - COUNTED
    return {
        **_told(asked, found),
        "kept": kept,
        "states": tuple(FeedbackState),
        "sources": SOURCES,
        "counts": _by_state(store_counts.feedback_states(at, project, since)),
        "at": lambda **changed: pagination.href("/ui/feedback", {**kept, **changed}),
        **pagination.pages("/ui/feedback", asked.query, kept, found),
    }


def one_feedback(asked: Asked) -> Mapping[str, Any]:
    """Load one feedback."""
    feedback_id = asked.path["feedback_id"]
    row = store_feedback.one(asked.connection, asked.project, feedback_id) if ID.fullmatch(feedback_id) else None
    if row is None:
        raise NotFound(f"there is no feedback {feedback_id[:200]!r} in this project")
    return {**_told(asked, Found([row], None, 0, stopped=False)), "one": row}


def _told(asked: Asked, found: Found) -> dict[str, Any]:
    ids = {row["trajectory_id"] for row in found.rows} - {None}
    standing = store_feedback.standing(asked.connection, asked.project, ids)
    meanings = {name: funnel.meaning_of(row["why_not_trained"]) for name, row in standing.items()}
    return {"found": found, "standing": standing, "meanings": meanings}


def _by_state(counts: list[tuple[str, str, int]]) -> dict[str, int]:
    told: dict[str, int] = {}
    for _, state, count in counts:
        told[state] = told.get(state, 0) + count
    return {state: told[state] for state in FeedbackState if state in told}


PAGES = [
    Page("/ui/feedback", "feedback.html", feedback, nav="/ui/feedback"),
    Page("/ui/feedback/{feedback_id}", "feedback_one.html", one_feedback, nav="/ui/feedback"),
]
ACTIONS: list[Action] = []
