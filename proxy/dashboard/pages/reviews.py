"""The review queue: attempts that wait for a human review, and the reviews.

A review is feedback like any app's: the same code reads, checks, redacts and commits it.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dashboard.interfaces import Action, ActionResult, FormRequest, Page, PageRequest
from proxy.dashboard.queries import reviews as store_reviews
from proxy.dashboard.views.message_view import messages_of
from proxy.domain.feedback import read_feedback
from proxy.domain.feedback_rows import row_of
from proxy.errors import BadRequest

MOST_MESSAGES = 8
"""Most messages of a conversation: the first one, and the rest from its end."""
MOST_CHARACTERS = 3_000


def reviews(request: PageRequest) -> Mapping[str, Any]:
    """Load the queue, the longest waiting first."""
    rows = store_reviews.waiting(request.connection, request.project)
    names = [row["trajectory_id"] for row in rows]
    scores = store_reviews.explanations(request.connection, request.project, {row["group_id"] for row in rows} - {None})
    shown = []
    for row, name in zip(rows, names, strict=True):
        messages = messages_of(row["messages"], MOST_CHARACTERS)
        answer = messages_of(row["response"], MOST_CHARACTERS)
        left_out = max(0, len(messages) - MOST_MESSAGES)
        messages = [*messages[:1], *messages[1 - MOST_MESSAGES :]] if left_out else messages
        shown.append(
            {**row, "messages": messages, "answer": answer, "left_out": left_out, "scores": scores.get(name, [])}
        )
    return {"rows": shown, "at_once": store_reviews.AT_ONCE}


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
    (feedback,), _ = read_feedback(msgspec.json.encode(body))
    (feedback_id,) = await request.parts.take([row_of(feedback, request.project, request.now)], request.visitor.key_id)
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


PAGES = [Page("/ui/reviews", "reviews.html", reviews, nav="/ui/reviews")]
ACTIONS = [Action("/ui/reviews/{trajectory_id}", review, back="/ui/reviews")]
