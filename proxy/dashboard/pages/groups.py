"""The pages of groups: the list, and one group's attempts side by side with their differences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import Action, Page, PageRequest
from proxy.dashboard.queries import groups as store_groups
from proxy.dashboard.queries import trajectories
from proxy.dashboard.queries.groups import Answer, Member
from proxy.dashboard.queries.newest import read_place
from proxy.dashboard.views import funnel
from proxy.dashboard.views.message_view import Message, messages_of
from proxy.dashboard.views.text_diff import Comparer, Comparison
from proxy.dashboard.views.turn_view import answer_of
from proxy.errors import NotFound
from whetstone.domain.states import GroupState

MOST_ATTEMPTS = 16
"""Most attempts shown side by side; of more, the best and the worst."""
BEST = 10
MOST_ANSWER = 4_000
"""Most characters of an answer."""


@dataclass(frozen=True, slots=True)
class Score:
    """A judge's score of an attempt."""

    judge: str
    score: float | None
    explanation: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One member of the group, prepared for comparison."""

    member: Member
    meaning: str | None
    answer: Answer | None
    message: Message | None
    text: str
    differs: Comparison | None
    is_best: bool
    weighed: Mapping[str, Any] | None
    scores: tuple[Score, ...]
    feedback: tuple[Mapping[str, Any], ...]


def groups(request: PageRequest) -> Mapping[str, Any]:
    """Load the newest groups."""
    filters = pagination.filters(request.query, "policy", "state")
    page = store_groups.groups(
        request.connection,
        request.project,
        filters.get("policy"),
        filters.get("state"),
        read_place(request.query.get("before")),
    )
    open_ids = [row["id"] for row in page.rows if row["state"] == "open"]
    return {
        "page": page,
        "sizes": store_groups.sizes(request.connection, request.project, open_ids),
        "filters": filters,
        "states": tuple(GroupState),
        "policies": trajectories.policy_names(request.connection, request.project),
        **pagination.pages("/ui/groups", request.query, filters, page),
    }


def group(request: PageRequest) -> Mapping[str, Any]:
    """Load one group and its attempts."""
    group_id, at, project = request.path["group_id"], request.connection, request.project
    row = store_groups.group(at, project, group_id)
    if row is None:
        raise NotFound(f"there is no group {group_id[:200]!r} in this project")
    members = sorted(store_groups.members(at, project, group_id), key=_best_first)
    shown = members if len(members) <= MOST_ATTEMPTS else [*members[:BEST], *members[BEST - MOST_ATTEMPTS :]]
    ids = [one.id for one in shown]
    judgements = store_groups.judgements(at, project, group_id)
    attempts = _attempts(
        shown,
        store_groups.answers(at, project, [one.tail_completion_id for one in shown if one.tail_completion_id]),
        store_groups.advantages(at, project, [row["policy"]], ids),
        judgements,
        store_groups.feedback_on(at, project, ids),
    )
    return {
        "group": row,
        "size": max(len(members), row["size"]),
        "attempts": attempts,
        "others": [one for one in members if one not in shown],
        "prompt": messages_of(store_groups.prompt(at, project, shown[0].id), MOST_ANSWER) if shown else [],
        "judgements": judgements,
        "task": next((one.task for one in members if one.task), None),
    }


def _best_first(one: Member) -> tuple[bool, float, str]:
    return (one.reward is None, -(one.reward or 0.0), one.id)


def _attempts(
    members: Sequence[Member],
    answers: Mapping[str, Answer],
    weighed: Sequence[Mapping[str, Any]],
    judgements: Sequence[Mapping[str, Any]],
    feedback: Sequence[Mapping[str, Any]],
) -> list[Attempt]:
    """Prepare the members. The first member is the best one, if any has a reward."""
    of_step = {one["trajectory_id"]: one for one in weighed}
    messages = {one.id: _message(answers.get(one.id)) for one in members}
    texts = {name: _text(answers.get(name), message) for name, message in messages.items()}
    best = members[0] if members and members[0].reward is not None else None
    compare = Comparer(texts[best.id]) if best is not None else None
    return [
        Attempt(
            member=one,
            meaning=funnel.meaning_of(one.why_not_trained),
            answer=answers.get(one.id),
            message=messages[one.id],
            text=texts[one.id],
            differs=None if compare is None or one is best else compare(texts[one.id]),
            is_best=one is best,
            weighed=of_step.get(one.id),
            scores=tuple(_scores(one.id, judgements)),
            feedback=tuple(row for row in feedback if row["trajectory_id"] == one.id),
        )
        for one in members
    ]


def _message(answer: Answer | None) -> Message | None:
    if answer is None:
        return None
    return answer_of({"response": answer.response, "response_text": answer.response_text}, MOST_ANSWER)


def _text(answer: Answer | None, message: Message | None) -> str:
    """Return the text to compare: the answer's text, then its tool calls."""
    if answer is None or message is None:
        return ""
    pieces = [f"{part.name} {part.text}" if part.kind == "call" else part.text for part in message.parts]
    return "\n".join(pieces)


def _scores(trajectory_id: str, judgements: Sequence[Mapping[str, Any]]) -> list[Score]:
    scores = []
    for one in judgements:
        entry = (one["scores"] or {}).get(trajectory_id)
        if one["state"] == "accepted" and isinstance(entry, Mapping):
            score, explanation = entry.get("score"), str(entry.get("explanation") or "")
            scores.append(Score(one["judge"], score, explanation, one["purpose"]))
    return scores


PAGES = [
    Page("/ui/groups", "groups.html", groups, nav="/ui/groups"),
    Page("/ui/groups/{group_id}", "group.html", group, nav="/ui/groups"),
]
ACTIONS: list[Action] = []
