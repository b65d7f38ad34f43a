"""Lists of the dashboard: their filters in the URL, the page before and the page behind. Pure; knows no table."""

from collections.abc import Mapping
from urllib.parse import urlencode

from proxy.ui.store_newest import Found, read_place

PLACE = "before"
"""The query's name of where a page begins."""


def href(path: str, query: Mapping[str, str | None]) -> str:
    """An address with these filters; what is None or empty is left out."""
    kept = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path


def filters(query: Mapping[str, str], *names: str) -> dict[str, str]:
    """The filters that are set, without blanks around them."""
    return {name: query[name].strip() for name in names if query.get(name, "").strip()}


def pages(path: str, query: Mapping[str, str], kept: Mapping[str, str], found: Found) -> dict[str, str | None]:
    """The addresses of the next page and of the newest one; None where there is none."""
    return {
        "older": href(path, {**kept, PLACE: str(found.older)}) if found.older else None,
        "newest": href(path, kept) if read_place(query.get(PLACE)) else None,
    }
