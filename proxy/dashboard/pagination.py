"""Build the URLs of lists: their filters, the older page and the newest one. Pure."""

from collections.abc import Mapping
from urllib.parse import urlencode

from proxy.dashboard.queries.newest import Found, read_place

PLACE = "before"
"""Query parameter with the place where a page begins."""


def href(path: str, query: Mapping[str, str | None]) -> str:
    """Return the address with these filters; None and empty values are left out."""
    kept = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path


def filters(query: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the filters that are set, without surrounding blanks."""
    return {name: query[name].strip() for name in names if query.get(name, "").strip()}


def pages(path: str, query: Mapping[str, str], kept: Mapping[str, str], found: Found) -> dict[str, str | None]:
    """Return the addresses of the next (older) page and of the newest one; None where there is none."""
    return {
        "older": href(path, {**kept, PLACE: str(found.older)}) if found.older else None,
        "newest": href(path, kept) if read_place(query.get(PLACE)) else None,
    }
