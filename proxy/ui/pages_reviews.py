"""The review queue: attempts that people are asked to look at, and what they say of them.

What they say is feedback like any app's: read, checked, redacted and committed by the same code.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.errors import BadRequest
from proxy.feedback import read_feedback
from proxy.feedback_rows import row_of
from proxy.ui import store_reviews
from proxy.ui.conversation import messages_of
from proxy.ui.page import Acting, Action, Asked, Done, Page

MOST_MESSAGES = 8
"""Of a conversation, from its end; the first one besides."""
MOST_CHARACTERS = 3_000


def reviews(asked: Asked) -> Mapping[str, Any]:
    """The queue, the longest waiting first."""
    rows = store_reviews.waiting(asked.connection, asked.project)
    names = [row["trajectory_id"] for row in rows]
    scores = store_reviews.explanations(asked.connection, asked.project, {row["group_id"] for row in rows} - {None})
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


async def review(acting: Acting) -> Done:
    """Take what was said of one attempt.

    Raises:
        BadRequest: nothing was said, or it is no reward.
        NotRecorded: the feedback could not be kept.
    """
    said: dict[str, Any] = {"trajectory_id": acting.path["trajectory_id"]}
    if acting.form.get("thumbs") in ("up", "down"):
        said["thumbs"] = acting.form["thumbs"]
    else:
        said["reward"] = _reward(acting.form.get("reward", ""))
    if comment := acting.form.get("comment", "").strip():
        said["comment"] = comment
    (feedback,), _ = read_feedback(msgspec.json.encode(said))
    (feedback_id,) = await acting.parts.take([row_of(feedback, acting.project, acting.now)], acting.visitor.key_id)
    told = f"thumbs {said['thumbs']}" if "thumbs" in said else f"reward {said['reward']:g}"
    return Done(f"Noted: {told} for {said['trajectory_id']} (feedback {feedback_id}).")


def _reward(text: str) -> float:
    try:
        reward = float(text.strip().replace(",", ".").replace("−", "-"))
    except ValueError as error:
        raise BadRequest("say thumbs up or down, or give a reward: a number such as 0.5", param="reward") from error
    if not math.isfinite(reward):
        raise BadRequest("a reward must be a finite number", param="reward")
    return reward


PAGES = [Page("/ui/reviews", "reviews.html", reviews, nav="/ui/reviews")]
ACTIONS = [Action("/ui/reviews/{trajectory_id}", review, back="/ui/reviews")]
