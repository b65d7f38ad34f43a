"""The page that finds trajectories: by an id, by their properties, by text of their answers."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from proxy.dashboard import pagination
from proxy.dashboard.interfaces import Action, Page, PageRequest
from proxy.dashboard.queries import search as store_search
from proxy.dashboard.queries import trajectories
from proxy.dashboard.queries.newest import read_place
from proxy.dashboard.queries.search import SearchCriteria
from proxy.dashboard.views import funnel
from proxy.dashboard.views.message_view import shortened
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


def search(request: PageRequest) -> Mapping[str, Any]:
    """Load the matches, the newest first; without a query the newest trajectories."""
    filters = pagination.filters(request.query, *FIELDS)
    criteria, wrong = read_criteria(filters)
    before = read_place(request.query.get("before"))
    values: dict[str, Any] = {
        "filters": filters,
        "wrong": wrong,
        "advanced": any(name in filters for name in FIELDS if name not in ("id", "policy", "state", "task")),
        "policies": trajectories.policy_names(request.connection, request.project),
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
        return {**values, "by_id": store_search.by_id(request.connection, request.project, filters["id"][:200])}
    if criteria.text:
        page = store_search.answers(request.connection, request.project, criteria, before)
        answers = [{**row, "around": around(row["response_text"] or "", criteria.text)} for row in page.rows]
        return {**values, "answers": answers, "page": page, **pagination.pages(PATH, request.query, filters, page)}
    page = store_search.trajectories(request.connection, request.project, criteria, before)
    return {**values, "page": page, **pagination.pages(PATH, request.query, filters, page)}


def read_criteria(filters: Mapping[str, str]) -> tuple[SearchCriteria, dict[str, str]]:
    """Return the query, and its errors: field -> message."""
    wrong: dict[str, str] = {}

    def read(name: str, reader: Any, why: str) -> Any:
        try:
            return reader(filters[name]) if name in filters else None
        except (ValueError, OverflowError):
            wrong[name] = why
            return None

    criteria = SearchCriteria(
        policy=filters.get("policy"),
        version=read("version", _version, "a version is a whole number: 3"),
        task=filters.get("task"),
        split=filters.get("split"),
        state=filters.get("state"),
        why_not_trained=filters.get("why"),
        end_user=filters.get("user"),
        metadata=read("metadata", _metadata, "write metadata as key=value, for example customer=42"),
        reward_from=read("from", _number, "a reward is a number: 0.5"),
        reward_to=read("to", _number, "a reward is a number: 0.5"),
        since=read("since", _time, "write the time as 2026-01-31 or 2026-01-31T12:00, in UTC"),
        until=read("until", _time, "write the time as 2026-01-31 or 2026-01-31T12:00, in UTC"),
        text=read("text", _text, f"give at least {LEAST_TEXT} characters"),
    )
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


def _version(text: str) -> int:
    version = int(text.removeprefix("v"))
    if not 0 <= version < 2**31:
        raise ValueError(text)
    return version


def _number(text: str) -> float:
    number = float(text.replace(",", "."))
    if number != number:
        raise ValueError(text)
    return number


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


PAGES = [Page(PATH, "search.html", search, nav=PATH)]
ACTIONS: list[Action] = []
