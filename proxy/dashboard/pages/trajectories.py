"""The page of one trajectory: the conversation, its reward, and its outcome."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from proxy.dashboard.interfaces import Action, Page, PageRequest
from proxy.dashboard.queries import groups, trajectories
from proxy.dashboard.views import funnel
from proxy.dashboard.views.token_colours import TINTS, Tint
from proxy.dashboard.views.turn_view import WHOLE, Bounds, Gap, Turn, turns_of
from proxy.dashboard.vocabulary import Vocabularies
from proxy.errors import NotFound

FIRST_TURNS, LAST_TURNS = 2, 8
"""Turns of a long conversation that are shown at first; the others are loaded on request."""
MORE_TURNS = 12
_VOCABULARIES = Vocabularies()


def trajectory(request: PageRequest) -> Mapping[str, Any]:
    """Load the trajectory, some of its turns, and its feedback."""
    trajectory_id = request.path["trajectory_id"]
    row = trajectories.trajectory(request.connection, request.project, trajectory_id)
    if row is None:
        raise NotFound(f"there is no trajectory {trajectory_id[:200]!r} in this project")
    tint = cast(Tint, request.query.get("tint")) if request.query.get("tint") in TINTS else "logprob"
    spans = _spans(row["completions"], request.query)
    alone = request.query.get("whole") == "1" and len(spans) == 1
    rows = [
        turn
        for start, end in spans
        for turn in trajectories.turns(request.connection, request.project, trajectory_id, start, end)
    ]
    policies = sorted({row["policy"], *(turn["policy"] for turn in rows)})
    weighed = groups.advantages(request.connection, request.project, policies, [trajectory_id])
    turns = _turns(request, rows, policies, weighed, tint, WHOLE if alone else Bounds())
    ids = [turn.id for turn in turns]
    continued = trajectories.continued_in(request.connection, request.project, ids)
    origin = {row["continues"]} - {None}
    before = trajectories.turn_of(request.connection, request.project, cast(set[str], origin))
    return {
        "trajectory": row,
        "meaning": funnel.meaning_of(row["why_not_trained"]),
        "remedy": funnel.remedy_of(row["why_not_trained"]),
        "meanings": {turn.why_not_trained: funnel.meaning_of(turn.why_not_trained) for turn in turns},
        "items": _with_gaps(turns, spans, request.query, row["completions"]),
        "spans": spans,
        "alone": alone,
        "tint": tint,
        "weighed": weighed,
        "scored": _scored(request, row),
        "feedback": groups.feedback_on(request.connection, request.project, [trajectory_id]),
        "before": before.get(row["continues"]),
        "continued_in": continued,
    }


def _spans(completions: int, query: Mapping[str, str]) -> list[tuple[int, int]]:
    """Return the ranges of turns to show: start and end (exclusive)."""
    start = _number(query.get("from"))
    if start is not None:
        end = start + MORE_TURNS
        return [(start, 1 + start if query.get("whole") == "1" else min(end, _number(query.get("until")) or end))]
    if completions <= FIRST_TURNS + LAST_TURNS + 2:
        return [(0, max(1, completions))]
    return [(0, FIRST_TURNS), (completions - LAST_TURNS, completions)]


def _with_gaps(
    turns: Sequence[Turn], spans: Sequence[tuple[int, int]], query: Mapping[str, str], completions: int
) -> list[Turn | Gap]:
    """Return the turns, with the gaps between and after them."""
    items: list[Turn | Gap] = list(turns)
    end = spans[-1][1]
    if len(spans) == 2:
        place = next((at for at, turn in enumerate(turns) if turn.number >= spans[1][0]), len(turns))
        items.insert(place, Gap(spans[0][1], spans[1][0]))
        return items
    until = min(_number(query.get("until")) or completions, completions)
    if end < until and query.get("whole") != "1":
        items.append(Gap(end, until))
    return items


def _turns(
    request: PageRequest,
    rows: Sequence[Mapping[str, Any]],
    policies: Sequence[str],
    weighed: Sequence[Mapping[str, Any]],
    tint: Tint,
    bounds: Bounds,
) -> list[Turn]:
    paths = trajectories.model_paths(request.connection, request.project, policies)
    advantages = {one["policy"]: one["advantage"] for one in weighed}
    known = {row["id"]: (row["trajectory_id"], row["turn"]) for row in rows}
    unknown = {row["follows"] for row in rows} - known.keys() - {None}
    places = known | trajectories.turn_of(request.connection, request.project, cast(set[str], unknown))

    def spell(policy: str, ids: Sequence[int]) -> list[str] | None:
        return _VOCABULARIES.texts(paths[policy], ids) if policy in paths else None

    return turns_of(rows, spell=spell, tint=tint, advantages=advantages, bounds=bounds, places=places)


def _scored(request: PageRequest, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the judges' scores of the trajectory, the latest first."""
    if row["group_id"] is None:
        return []
    scores = []
    for one in groups.judgements(request.connection, request.project, row["group_id"]):
        entry = (one["scores"] or {}).get(row["id"])
        if one["state"] == "accepted" and isinstance(entry, Mapping):
            scores.append({"parts": None, "score": None, "explanation": "", **one, **entry})
    return scores


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else None


PAGES = [Page("/ui/trajectories/{trajectory_id}", "trajectory.html", trajectory, nav="/ui/trajectories")]
ACTIONS: list[Action] = []
