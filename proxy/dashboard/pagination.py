"""Build the URLs of lists: their filters, the older page and the newest one. Pure."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from urllib.parse import urlencode

from proxy.dashboard.queries.newest import RowPage, read_place

PLACE = "before"
"""Query parameter with the place where a page begins."""


def href(path: str, query: Mapping[str, str | None]) -> str:
    """Return the address with these filters; None and empty values are left out."""
    parameters = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(parameters)}" if parameters else path


def filters(query: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the filters that are set, without surrounding blanks."""
    return {name: query[name].strip() for name in names if query.get(name, "").strip()}


def window(
    filters: Mapping[str, str], windows: Mapping[str, timedelta | None], now: datetime
) -> tuple[str, datetime | None]:
    """Return the chosen window, a week by default, and the full hour at which it begins; None: it has no beginning."""
    name = filters["window"] if filters.get("window") in windows else "week"
    length = windows[name]
    return name, None if length is None else (now - length).replace(minute=0, second=0, microsecond=0)


def pages(path: str, query: Mapping[str, str], filters: Mapping[str, str], page: RowPage) -> dict[str, str | None]:
    """Return the addresses of the next (older) page and of the newest one; None where there is none."""
    return {
        "older": href(path, {**filters, PLACE: str(page.older)}) if page.older else None,
        "newest": href(path, filters) if read_place(query.get(PLACE)) else None,
    }
