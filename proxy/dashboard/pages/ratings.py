"""The pages of ratings: the queue of attempts to rate, and the raters with their agreement; the forms that rate an
attempt or one answer, on any page.

A rating is feedback like any app's: the same code reads, checks, redacts and commits it. Its metadata names the rater.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import ActionResult, FormRequest, PageRequest
from proxy.dashboard.queries import ratings as store_ratings
from proxy.dashboard.queries import trajectories as store_trajectories
from proxy.dashboard.views import agreement, priority
from proxy.dashboard.views.message_view import excerpt
from proxy.domain.feedback import read_feedback
from proxy.domain.feedback_rows import row_of
from proxy.errors import BadRequest
from whetstone.domain.api_keys import NAME

PATH = "/ui/rate"
ALL = "all"
"""The split of links to the attempts of both splits."""
AT_ONCE = 20
"""Attempts of one page."""
SCORES = range(1, 6)
"""Scores that a rater can give; the lowest is the reward 0, the highest 1."""
MOST_PAIRS = 100
AFTER = re.compile(r"([0-9]{1,9})~(-?[0-9]{1,12})~(-?[0-9]{1,18})~(.+)")
"""A place in the queue, in the address of the attempts after it."""


def queue(request: PageRequest) -> Mapping[str, Any]:
    """Load the attempts that a further rating tells most about, without those that this rater has rated.

    The first attempt of every group comes before the second of any.
    """
    at, project, rater = request.connection, request.project, request.visitor.rater
    filters, linked = _filters(request.query)
    page = store_ratings.candidates(at, project, filters)
    ids = [row["id"] for row in page.rows]
    feedback = store_ratings.feedback_about(at, project, ids)
    group_ids = {row["group_id"] for row in page.rows if row["reward_source"] == "judge"} - {None}
    opinions = priority.opinions(page.rows, feedback, store_ratings.judged(at, project, group_ids))
    own = store_ratings.own(at, project, rater, ids, ())
    prioritised = [
        {**row, "opinions": values, "priority": priority.priority(values)}
        for row in page.rows
        for values in [opinions[row["id"]].values]
    ]
    ranked = [row for row in priority.by_group(prioritised, own, _by_priority) if row["id"] not in own]
    ranked.sort(key=_place)
    after = _read_place(request.query.get("after", ""))
    left = [row for row in ranked if after is None or _place(row) > after]
    shown = left[:AT_ONCE]
    conversations = store_ratings.conversations(at, project, [row["tail_completion_id"] for row in shown])
    later = "~".join(map(str, _place(shown[-1]))) if len(left) > AT_ONCE else None
    return {
        "rows": [
            {**row, **excerpt(conversations[row["tail_completion_id"]])}
            for row in shown
            if row["tail_completion_id"] in conversations
        ],
        "waiting": len(ranked),
        "page": page,
        "filters": filters,
        "policies": store_trajectories.policy_names(at, project),
        "later": pagination.href(PATH, {**linked, "after": later}) if later else None,
        "first": pagination.href(PATH, linked),
        "is_first": "after" not in request.query,
    }


def _filters(query: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the filters of the queue, and what links to it name.

    Without a split, only attempts that may be trained on are shown: a rating of a held-out one changes the figures that
    versions are compared by.
    """
    filters = pagination.filters({"split": "train", **query}, "policy", "task", "split")
    if filters.get("split") in (None, ALL):
        filters.pop("split", None)
        return filters, {**filters, "split": ALL}
    return filters, filters


def raters(request: PageRequest) -> Mapping[str, Any]:
    """Load the raters, and how far they agree."""
    page = store_ratings.newest_ratings(request.connection, request.project)
    ratings = agreement.by_target(page.rows)
    pairs = agreement.pairs(ratings)
    return {
        "page": page,
        "raters": agreement.raters(page.rows),
        "pairs": pairs[:MOST_PAIRS],
        "more_pairs": max(0, len(pairs) - MOST_PAIRS),
        "rated_twice": sum(len(by_rater) > 1 for by_rater in ratings.values()),
        "alpha": agreement.alpha(ratings),
        "most": store_ratings.MOST_RATINGS,
    }


async def rate(request: FormRequest) -> ActionResult:
    """Store the rating of an attempt or of one answer.

    Raises:
        BadRequest: the form has neither thumbs nor a score nor the right answer, or one that is invalid.
        NotRecorded: the rating could not be stored.
    """
    ((name, target_id),) = request.path.items()
    form, summary, reward = request.form, "", None
    body: dict[str, Any] = {name: target_id}
    metadata: dict[str, Any] = {}
    if form.get("thumbs") in ("up", "down"):
        body["thumbs"] = form["thumbs"]
        reward = float(form["thumbs"] == "up")
        summary = f"thumbs {form['thumbs']}"
    elif "score" in form:
        score = _score(form["score"])
        body["reward"] = reward = reward_of(score)
        metadata["score"] = score
        summary = f"score {score}"
    if demonstration := form.get("demonstration", "").strip():
        body["demonstration"] = demonstration
        summary = f"{summary}, the right answer".removeprefix(", ")
    if not summary:
        raise BadRequest("choose thumbs, a score, or enter the right answer; a comment alone is not stored")
    if comment := form.get("comment", "").strip():
        body["comment"] = comment
    await save(request, {**body, "metadata": metadata})
    return ActionResult(f"Saved: {summary}", reward=reward if name == "trajectory_id" else None)


async def save(request: FormRequest, *bodies: Mapping[str, Any]) -> list[str]:
    """Store ratings with their rater, all or none; return the ids of the feedback.

    Raises:
        BadRequest: one is not valid feedback.
        NotRecorded: they could not be stored.
    """
    rater = {"rater": request.visitor.rater}
    named = [{**body, "metadata": {**rater, **body.get("metadata", {})}} for body in bodies]
    feedback, _ = read_feedback(msgspec.json.encode(named))
    rows = [row_of(one, request.project, request.now) for one in feedback]
    return [result.id for result in await request.parts.take(rows, request.visitor.key_id)]


async def set_name(request: FormRequest) -> ActionResult:
    """Choose the name under which this browser rates.

    Raises:
        BadRequest: it is no name.
    """
    name = " ".join(request.form.get("rater", "").split())
    if name and not re.fullmatch(NAME, name):
        raise BadRequest("a name has 1 to 100 characters", param="rater")
    return ActionResult(f"You rate as {name}" if name else "You rate under the name of your key", rater=name)


def reward_of(score: int) -> float:
    """Return the reward of a score: evenly spaced from 0 to 1."""
    return (score - SCORES[0]) / (SCORES[-1] - SCORES[0])


def _score(text: str) -> int:
    if text not in map(str, SCORES):
        raise BadRequest(f"a score is a whole number from {SCORES[0]} to {SCORES[-1]}", param="score")
    return int(text)


def _by_priority(row: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return what attempts are ordered by: their priority; of equal ones the newest first."""
    return -round(1e9 * row["priority"]), -int(row["created_at"].timestamp() * 1e6), row["id"]


def _place(row: Mapping[str, Any]) -> tuple[int, int, int, str]:
    """Return the place of an attempt in the queue: the first of each group by priority, then the second of each."""
    return row["in_group"], *_by_priority(row)


def _read_place(text: str) -> tuple[int, int, int, str] | None:
    match = AFTER.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]), match[4])
