"""Render pages from Jinja templates, with autoescape and strict undefined values; format times and numbers.

Pages, and the look-up of sessions, run in a few threads: they never take all database connections from requests.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from proxy.dashboard import assets
from proxy.dashboard.interfaces import Visitor

TEMPLATES = Path(__file__).parent / "templates"
NOTHING = "–"
"""Stands for NULL: a value that was not measured is not zero."""
_SPANS = ((86_400 * 365, "y"), (86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 4
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ui")


async def in_page_thread(do: Callable[P, R], *args: P.args, **values: P.kwargs) -> R:
    """Run `do` in one of these threads, with the caller's context; return its result."""
    work: Callable[[], R] = partial(copy_context().run, do, *args, **values)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def page(template: str, visitor: Visitor, here: str, now: datetime, values: Mapping[str, Any]) -> str:
    """Return the page of this template. `here`: path and query of the request. Usable from any thread."""
    common = {"visitor": visitor, "here": here, "now": now, "nav": None, "current": None, "notice": None}
    return _environment().get_template(template).render(common | dict(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "utc": utc, "stamp": stamp, "ago": ago, "number": number, "whole": whole, "short": short,
        "percent": percent, "seconds": seconds, "milliseconds": milliseconds, "signed": signed, "money": money,
    }  # fmt: skip
    environment.globals |= {
        "static": lambda name: f"{assets.URL}{name}?v={assets.files()[name].version}",
        "nothing": NOTHING,
    }
    return environment


def utc(when: datetime | None) -> str:
    """Format as `2026-01-31 12:00:05`, in UTC."""
    return NOTHING if when is None else f"{_aware(when):%Y-%m-%d %H:%M:%S}"


def stamp(when: datetime) -> str:
    """Format for `<time datetime>`."""
    return f"{_aware(when):%Y-%m-%dT%H:%M:%SZ}"


def ago(when: datetime | None, now: datetime) -> str:
    """Format as `3 min ago`, `in 2 h`; whole units, the largest that fits."""
    if when is None:
        return NOTHING
    elapsed_s = (now - _aware(when)).total_seconds()
    size, unit = next((one for one in _SPANS if abs(elapsed_s) >= one[0]), (1, "s"))
    count = int(abs(elapsed_s) // size)
    if not count:
        return "now"
    return f"{count} {unit} ago" if elapsed_s > 0 else f"in {count} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits, as short as possible: `0.0123`, `1.5e-07`, `12,345`."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-4 or abs(value) >= 1e15):
        figures, _, power = f"{value:.{digits - 1}g}".partition("e")
        return f"{figures}e{int(power)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{min(decimals, 6)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """Format a difference: `+0.12`, `−0.3`, `0`."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 else text


def whole(value: int | None) -> str:
    """Format as `12,345`."""
    return NOTHING if value is None else f"{value:,}"


def short(value: float | None) -> str:
    """Format a count in as few characters as its size needs: `9,999`, `12.3k`, `4.5M`."""
    if value is None:
        return NOTHING
    size, unit = next((one for one in _LARGE if abs(value) >= one[0]), (1, ""))
    if not unit:
        return number(value, 4)
    size = 1e3 if unit == "k" else size
    return f"{value / size:.3g}{unit}" if value / size < 1000 else f"{value / size:.0f}{unit}"


def percent(share: float | None, digits: int = 0) -> str:
    """Format as `42 %`."""
    return NOTHING if share is None else f"{100 * share:.{digits}f} %"


def seconds(value: float | None) -> str:
    """Format as `340 ms`, `12.5 s`, `3 min 20 s`, `2 h 5 min`."""
    if value is None:
        return NOTHING
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def milliseconds(value: float | None) -> str:
    """Format milliseconds as `seconds` does."""
    return seconds(None if value is None else value / 1000)


def money(value: float | None) -> str:
    """Format US dollars; amounts below 1 get four decimals."""
    if value is None:
        return NOTHING
    return f"${value:,.2f}" if value >= 1 or not value else f"${value:.4f}"


def _aware(when: datetime) -> datetime:
    return when.astimezone(UTC) if when.tzinfo else when.replace(tzinfo=UTC)
