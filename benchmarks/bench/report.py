"""Print the figures of a run as tables."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.bench.figures import RATES, SATURATED, Bar, Figures, Measurement
from benchmarks.bench.sides import DIRECT
from benchmarks.kit.process import mib


def where(own: list[set[int]], load: set[int]) -> str:
    """Return a line on which cores do what."""
    text = f"each side on core {_list(own[0])}, the load generator and the upstream on {_list(load)}"
    if len(own) > 1:
        return f"{text}; two workers on {_list(own[0] | own[1])}"
    return f"{text}{', which is the same one' if own[0] & load else ''}; two workers are measured from four cores on"


def show(console: Console, figures: Figures, bars: Sequence[Bar], notes: list[str]) -> None:
    """Print all tables; without bars, no table of bars."""
    console.print(_rates(figures))
    if figures.of("open", DIRECT) or figures.of("first", DIRECT):
        console.print(_delays(figures))
    if any(what.startswith("paced") for what in figures.by):
        console.print(_paced(figures))
    console.print(_memory(figures))
    if bars:
        console.print(_bars(bars))
    for note in notes[:10]:
        console.print(f"note: {note}", markup=False, highlight=False)


def verdict(faults: Sequence[str], bars: Sequence[Bar]) -> tuple[bool, str]:
    """Return whether the run holds, and its last line. A bar that was not measured decides nothing, but is counted."""
    missed = [bar.name for bar in bars if bar.holds is False]
    reached = sum(bar.holds is True for bar in bars)
    wrong = [f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}"] if faults else []
    wrong += [f"{len(missed)} of {len(missed) + reached} bars missed ({'; '.join(missed)})"] if missed else []
    if wrong:
        return False, f"it does not hold: {', '.join(wrong)}"
    if not bars:
        return True, "it holds: no faults; the run was too short to judge the bars"
    return True, f"it holds: no faults, {reached} bars reached, {len(bars) - reached} not measured"


def _rows(
    figures: Figures, table: Table, measurements: tuple[str, ...]
) -> Iterator[tuple[str, str, list[Measurement]]]:
    """Yield measurement, side and rounds of each row, and begin a section of the table for each measurement.

    `measurements`: what their names begin with.
    """
    for what, sides in figures.by.items():
        if what.startswith(measurements):
            table.add_section()
            for side, rounds in sides.items():
                yield what, side, rounds


def _rates(figures: Figures) -> Table:
    caption = (
        f"× is a ratio of requests/s, the median of the rounds. A side that used less than {SATURATED:.0%} of its core "
        "(*) was slowed down by the load generator or by other programs: in a ratio to it, its whole core counts."
    )
    headings = ("what, connections", "side", "requests/s", "core", "CPU us each", "added p50 ms", "added p99 ms")
    others = [DIRECT, *(side for side in figures.sides() if side != DIRECT and not side.startswith("whetstone"))]
    ratios = (f"× {name}" for name in others)
    table = Table(*headings, *ratios, "opened", "SQL after", title="As many as can be", caption=caption)
    for what, side, rounds in _rows(figures, table, RATES):
        busy = figures.median(what, side, "busy")
        added = (figures.added_ms(what, side, share) for share in (0.5, 0.99))
        table.add_row(
            what,
            side,
            _number(figures.median(what, side, "rate"), ",.0f") + ("*" if busy and busy < SATURATED else ""),
            _number(busy or None, ".0%"),
            _number(figures.cpu_us(what, side), ",.0f"),
            *("" if side == DIRECT else _number(value) for value in added),
            *("" if side == other else _number(figures.ratio(what, side, other)) for other in others),
            str(sum(one.opened for one in rounds)),
            f"{max(one.written_s for one in rounds):.1f} s" if side.startswith("whetstone") else "",
        )
    return table


def _delays(figures: Figures) -> Table:
    table = Table("what", "side", "p50 ms", "p99 ms", "added p50", "added p99", "core", "CPU us each", "lost")
    table.title = "Delays: 1,000 requests/s, from when each is due; the first event of a stream"
    for what, side, _ in _rows(figures, table, ("open", "first")):
        first = what == "first"
        took = (figures.percentile(what, side, share, first=first) for share in (0.5, 0.99))
        added = (figures.added_ms(what, side, share, first=first) for share in (0.5, 0.99))
        table.add_row(
            what,
            side,
            *map(_number, took),
            *("" if side == DIRECT else _number(value) for value in added),
            _number(figures.median(what, side, "busy") or None, ".0%"),
            _number(figures.cpu_us(what, side), ",.0f"),
            str(figures.lost(what, side) or ""),
        )
    return table


def _paced(figures: Figures) -> Table:
    table = Table("what, streams", "side", "core", "longer than the schedule", "first event p50 ms", "streams", "lost")
    table.title = "Streams of 64 events, one every 10 ms"
    for what, side, rounds in _rows(figures, table, ("paced",)):
        table.add_row(
            what,
            side,
            _number(figures.median(what, side, "busy") or None, ".0%"),
            _number(figures.longer(what, side), ".1%"),
            _number(figures.percentile(what, side, 0.5, first=True)),
            str(sum(len(one.took.ms) for one in rounds)),
            str(figures.lost(what, side) or ""),
        )
    return table


def _memory(figures: Figures) -> Table:
    table = Table("side", "under load", "highest", "silent streams", "KiB each", title="Memory")
    for side, highest in figures.highest_rss.items():
        streams, each = figures.silent_streams.get(side, (None, None))
        cells = ("", "") if streams is None or each is None else (str(streams), f"{each / 1024:.1f}")
        table.add_row(side, mib(figures.rss_bytes(side)), mib(highest), *cells)
    return table


def _bars(bars: Sequence[Bar]) -> Table:
    table = Table("what must hold", "must", "aim", "is", "holds", title="Bars")
    for bar in bars:
        sign = "≥" if bar.least else "≤"
        aim = "" if bar.aim is None else f"{sign} {bar.aim:g}"
        result = {None: "not measured", True: "yes, and the aim" if bar.aimed else "yes", False: "NO"}[bar.holds]
        table.add_row(bar.name, f"{sign} {bar.must:.4g}", aim, _number(bar.value, ".4g"), result)
    return table


def _number(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else format(value, form) if math.isfinite(value) else "saturated"


def _list(cores: set[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
