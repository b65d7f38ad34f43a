"""The pages of groups: the list, and one group's attempts side by side with their differences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import groups as store_groups
from proxy.dashboard.queries import ratings as store_ratings
from proxy.dashboard.queries import trajectories
from proxy.dashboard.queries.first_lines import group_prompts
from proxy.dashboard.queries.newest import read_place
from proxy.dashboard.views import funnel
from proxy.dashboard.views.message_view import Message, messages_of
from proxy.dashboard.views.text_diff import Comparer
from proxy.dashboard.views.turn_view import answer_of
from proxy.errors import NotFound
from whetstone.domain.states import GroupState

MOST_ATTEMPTS = 16
"""Most attempts shown side by side; of more, the best and the worst."""
BEST = 10
MOST_ANSWER = 4_000
"""Most characters of an answer."""
EARLIER_TURNS = 6
"""Most turns of an attempt that are shown folded above its last answer."""
MOST_EARLIER = 600
"""Most characters of each part in them."""


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
        "prompts": group_prompts(request.connection, request.project, [row["id"] for row in page.rows]),
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
    ids = [one["id"] for one in shown]
    tails = [one["tail_completion_id"] for one in shown if one["tail_completion_id"]]
    answers = store_groups.answers(at, project, tails)
    weighed = {one["trajectory_id"]: one for one in store_groups.advantages(at, project, [row["policy"]], ids)}
    judgements = store_groups.judgements(at, project, group_id)
    own = store_ratings.own(at, project, request.visitor.rater, ids, ())
    several = [one["id"] for one in shown if one["completions"] > 1]
    turns = store_groups.turns(at, project, several, EARLIER_TURNS)
    feedback = store_groups.feedback_on(at, project, ids)
    best = _best(members)
    attempts = [
        {
            "member": one,
            "meaning": funnel.meaning_of(one["why_not_trained"]),
            "weighed": weighed.get(one["id"]),
            "scores": store_groups.scores_of(judgements, one["id"]),
            "feedback": [item for item in feedback if item["trajectory_id"] == one["id"]],
            "is_best": best is not None and one["reward"] == best,
            "earlier": _earlier(one, turns.get(one["id"], ())),
            "more_turns": max(0, one["completions"] - 1 - EARLIER_TURNS),
            "own": own.get(one["id"]),
            **compared,
        }
        for one, compared in zip(shown, _compared(shown, answers), strict=True)
    ]
    return {
        "group": row,
        "size": max(len(members), row["size"]),
        "attempts": attempts,
        "others": [one for one in members if one["id"] not in ids],
        "prompt": messages_of(store_groups.prompt(at, project, ids[0]), MOST_ANSWER) if ids else [],
        "judgements": judgements,
        "task": next((one["task"] for one in members if one["task"]), None),
    }


def _earlier(member: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return what came between the prompt, which all attempts share, and the last answer."""
    messages: list[Message] = []
    for turn in turns:
        if turn["turn"]:
            messages += messages_of(turn["new_messages"], MOST_EARLIER)
        answer = None if turn["id"] == member["tail_completion_id"] else answer_of(turn, MOST_EARLIER)
        messages += [] if answer is None else [answer]
    return messages


def _best_first(member: Mapping[str, Any]) -> tuple[bool, float, str]:
    return (member["reward"] is None, -(member["reward"] or 0.0), member["id"])


def _best(members: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the highest reward; None if no other one is lower."""
    rewards = [one["reward"] for one in members if one["reward"] is not None]
    return max(rewards) if rewards and max(rewards) > min(rewards) else None


def _compared(
    members: Sequence[Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the answer of each member, and how it differs from the reference: the first one, if it has a reward."""
    compare: Comparer | None = None
    for place, member in enumerate(members):
        answer = answers.get(member["id"])
        message = None if answer is None else answer_of(answer, MOST_ANSWER)
        text = "" if message is None else _text(message)
        is_reference = place == 0 and member["reward"] is not None
        differs = None if compare is None else compare(text)
        compare = Comparer(text) if is_reference else compare
        yield {"answer": answer, "message": message, "text": text, "differs": differs, "is_reference": is_reference}


def _text(message: Message) -> str:
    """Return the text to compare: the answer's text, then its tool calls."""
    return "\n".join(f"{part.name} {part.text}" if part.kind == "call" else part.text for part in message.parts)
