"""The pages of trajectories: the search, by an id, by their properties, or by text of their answers; and one
trajectory, with its conversation, its reward and its outcome."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from proxy.dashboard import pagination, vocabulary
from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import groups as store_groups
from proxy.dashboard.queries import ratings as store_ratings
from proxy.dashboard.queries import trajectories as store_trajectories
from proxy.dashboard.queries.first_lines import first_lines
from proxy.dashboard.queries.newest import read_place
from proxy.dashboard.views import funnel
from proxy.dashboard.views.message_view import shortened
from proxy.dashboard.views.turn_view import TINTS, WHOLE, Bounds, Gap, Tint, Turn, turns_of
from proxy.errors import NotFound
from whetstone.domain.states import TrajectoryStatus
from whetstone.domain.why_not_trained import WhyNotTrained

PATH = "/ui/trajectories"
FIELDS = (
    *("id", "policy", "version", "task", "split", "state", "why", "user", "metadata", "from", "to", "since", "until"),
    "text",
)
KEY = re.compile(r'[^"\\=\x00-\x1f]{1,100}')
"""A key of metadata that both databases can search for."""
LEAST_TEXT = 3
AROUND = 90
"""Characters of an answer shown before and after a match."""
FIRST_TURNS, LAST_TURNS = 2, 8
"""Turns of a long conversation that are shown at first; the others are loaded on request."""
MORE_TURNS = 12


def search(request: PageRequest) -> Mapping[str, Any]:
    """Load the matches, the newest first; without a query the newest trajectories."""
    filters = pagination.filters(request.query, *FIELDS)
    criteria, wrong = read_criteria(filters)
    before = read_place(request.query.get("before"))
    values: dict[str, Any] = {
        "filters": filters,
        "wrong": wrong,
        "advanced": any(name in filters for name in FIELDS if name not in ("id", "policy", "state", "task")),
        "policies": store_trajectories.policy_names(request.connection, request.project),
        "states": tuple(TrajectoryStatus),
        "reasons": [(one.value, one.meaning) for one in WhyNotTrained],
        "meaning_of": funnel.meaning_of,
        "by_id": None,
        "answers": None,
        "page": None,
        "older": None,
        "newest": None,
    }
    if wrong:
        return values
    if "id" in filters:
        return {**values, "by_id": store_trajectories.by_id(request.connection, request.project, filters["id"][:200])}
    if "text" in criteria:
        page = store_trajectories.answers(request.connection, request.project, criteria, before)
        answers = [{**row, "around": around(row["response_text"] or "", criteria["text"])} for row in page.rows]
        return {**values, "answers": answers, "page": page, **pagination.pages(PATH, request.query, filters, page)}
    page = store_trajectories.matches(request.connection, request.project, criteria, before)
    lines = first_lines(request.connection, request.project, page.rows)
    return {**values, "page": page, "lines": lines, **pagination.pages(PATH, request.query, filters, page)}


def read_criteria(filters: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the criteria, field -> value, and their errors, field -> message."""
    criteria: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, text in filters.items():
        reader, why = _READERS.get(name, (str, ""))
        try:
            criteria[name] = reader(text)
        except (ValueError, OverflowError):
            wrong[name] = why
    return criteria, wrong


def around(text: str, words: str) -> tuple[str, str, str]:
    """Return the text before the match, the match, and the text after it, on one line."""
    place = text.lower().find(words.lower())
    if place < 0:
        return shortened(text, 2 * AROUND), "", ""
    start, end = max(0, place - AROUND), place + len(words)
    before, behind = " ".join(text[start:place].split()), shortened(text[end:], AROUND)
    gap = " " if text[place - 1 : place].isspace() else ""
    led = "…" if start else ""
    return f"{led}{before}{gap}", text[place:end], f" {behind}" if text[end : end + 1].isspace() else behind


def trajectory(request: PageRequest) -> Mapping[str, Any]:
    """Load the trajectory, some of its turns, and its feedback."""
    trajectory_id = request.path["trajectory_id"]
    row = store_trajectories.trajectory(request.connection, request.project, trajectory_id)
    if row is None:
        raise NotFound(f"there is no trajectory {trajectory_id[:200]!r} in this project")
    tint = cast(Tint, request.query.get("tint")) if request.query.get("tint") in TINTS else "logprob"
    spans = _spans(row["completions"], request.query)
    alone = request.query.get("whole") == "1" and len(spans) == 1
    rows = [
        turn
        for start, end in spans
        for turn in store_trajectories.turns(request.connection, request.project, trajectory_id, start, end)
    ]
    policies = sorted({row["policy"], *(turn["policy"] for turn in rows)})
    weighed = store_groups.advantages(request.connection, request.project, policies, [trajectory_id])
    turns = _turns(request, rows, policies, weighed, tint, WHOLE if alone else Bounds())
    ids = [turn["id"] for turn in rows]
    origin = [row["continues"]] if row["continues"] is not None else []
    group_id = row["group_id"]
    judgements = store_groups.judgements(request.connection, request.project, group_id) if group_id is not None else []
    return {
        "trajectory": row,
        "meaning": funnel.meaning_of(row["why_not_trained"]),
        "remedy": funnel.remedy_of(row["why_not_trained"]),
        "meanings": {turn["why_not_trained"]: funnel.meaning_of(turn["why_not_trained"]) for turn in rows},
        "items": _with_gaps(turns, spans, request.query, row["completions"]),
        "spans": spans,
        "alone": alone,
        "tint": tint,
        "weighed": weighed,
        "scored": store_groups.scores_of(judgements, trajectory_id),
        "feedback": store_groups.feedback_on(request.connection, request.project, [trajectory_id]),
        "own": store_ratings.own(request.connection, request.project, request.visitor.rater, [trajectory_id], ids),
        "before": store_trajectories.turn_of(request.connection, request.project, origin).get(row["continues"]),
        "continued_in": store_trajectories.continued_in(request.connection, request.project, ids),
    }


def _spans(completions: int, query: Mapping[str, str]) -> list[tuple[int, int]]:
    """Return the ranges of turns to show: start and end (exclusive)."""
    start = _turn_number(query.get("from"))
    if start is not None:
        end = start + MORE_TURNS
        return [(start, 1 + start if query.get("whole") == "1" else min(end, _turn_number(query.get("until")) or end))]
    if completions <= FIRST_TURNS + LAST_TURNS + 2:
        return [(0, max(1, completions))]
    return [(0, FIRST_TURNS), (completions - LAST_TURNS, completions)]


def _with_gaps(
    turns: Sequence[Turn], spans: Sequence[tuple[int, int]], query: Mapping[str, str], completions: int
) -> list[Turn | Gap]:
    """Return the turns, with the gaps between and after them."""
    if len(spans) == 2:
        place = next((at for at, turn in enumerate(turns) if turn.row["turn"] >= spans[1][0]), len(turns))
        return [*turns[:place], Gap(spans[0][1], spans[1][0]), *turns[place:]]
    ((_, end),) = spans
    until = min(_turn_number(query.get("until")) or completions, completions)
    return [*turns, Gap(end, until)] if end < until and query.get("whole") != "1" else [*turns]


def _turns(
    request: PageRequest,
    rows: Sequence[Mapping[str, Any]],
    policies: Sequence[str],
    weighed: Sequence[Mapping[str, Any]],
    tint: Tint,
    bounds: Bounds,
) -> list[Turn]:
    paths = store_trajectories.model_paths(request.connection, request.project, policies)
    advantages = {one["policy"]: one["advantage"] for one in weighed}
    known = {row["id"]: (row["trajectory_id"], row["turn"]) for row in rows}
    unknown = {row["follows"] for row in rows} - known.keys() - {None}
    places = known | store_trajectories.turn_of(request.connection, request.project, cast(set[str], unknown))

    def spell(policy: str, ids: Sequence[int]) -> list[str] | None:
        return vocabulary.texts(paths[policy], ids) if policy in paths else None

    return turns_of(rows, spell=spell, tint=tint, advantages=advantages, bounds=bounds, places=places)


def _turn_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 9 else None


def _version(text: str) -> int:
    version = int(text.removeprefix("v"))
    if not 0 <= version < 2**31:
        raise ValueError(text)
    return version


def _reward(text: str) -> float:
    reward = float(text.replace(",", "."))
    if math.isnan(reward):
        raise ValueError(text)
    return reward


def _metadata(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not KEY.fullmatch(key.strip()):
        raise ValueError(text)
    return key.strip(), value.strip()


def _time(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _text(text: str) -> str:
    if len(text) < LEAST_TEXT:
        raise ValueError(text)
    return text[:200]


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "version": (_version, "a version is a whole number: 3"),
    "metadata": (_metadata, "write metadata as key=value, for example customer=42"),
    "from": (_reward, "a reward is a number: 0.5"),
    "to": (_reward, "a reward is a number: 0.5"),
    "since": (_time, "write the time as 2026-01-31 or 2026-01-31T12:00, in UTC"),
    "until": (_time, "write the time as 2026-01-31 or 2026-01-31T12:00, in UTC"),
    "text": (_text, f"give at least {LEAST_TEXT} characters"),
}
"""Field -> how it is read, and what to write instead if it cannot be; the other fields are text."""
