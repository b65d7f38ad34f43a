"""Compute the reported figures from measurements: percentiles, ratios, the bars, the baseline check. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bench.load import LoadResult
from benchmarks.bench.sides import DIRECT
from benchmarks.bench.upstream import EVENTS, EVERY_S

TOLERANCE = 0.35
"""How much worse than the baseline's a ratio may be: between two runs of the same code on a busy machine a third is not
rare.
"""
SATURATED = 0.9
"""Share of its core: a side that uses less is limited by the load generator, which shares the other core with the
upstream.
"""
PACED_S = EVENTS * EVERY_S
"""Duration of a paced stream by the upstream's own schedule."""
RATES = ("plain", "large", "stream")
"""Measurements that send as many requests as possible."""


@dataclass
class Measurement:
    """One side in one measurement of one round."""

    took: LoadResult
    cpu_s: float = 0.0
    """CPU time of the side, until everything was written."""
    busy: float = 0.0
    """Share of its core during the load; 0 where that is unknown."""
    rss_bytes: int = 0
    opened: int = 0
    """Connections that the upstream accepted meanwhile."""
    written_s: float = 0.0
    """How long SQL took for the rest after the last answer."""

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.took.ms) / self.took.seconds

    @property
    def capacity(self) -> float:
        """Answers per second if it had used its core fully: the rate, where it has."""
        return self.rate / self.busy if 0 < self.busy < SATURATED else self.rate


@dataclass
class Figures:
    """All figures of a run: measurement -> side -> rounds."""

    by: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)
    silent_streams: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Side -> number of streams open at once, bytes each."""
    highest_rss: dict[str, int] = field(default_factory=dict)
    """Side -> VmHWM after all requests, but before the silent streams."""

    def add(self, what: str, side: str, measured: Measurement) -> None:
        self.by.setdefault(what, {}).setdefault(side, []).append(measured)

    def sides(self) -> list[str]:
        """Return all sides that were measured."""
        return list(dict.fromkeys(side for measured in self.by.values() for side in measured))

    def of(self, what: str, side: str) -> list[Measurement]:
        """Return its rounds; none where it was not measured."""
        return self.by.get(what, {}).get(side, [])

    def median(self, what: str, side: str, figure: str) -> float | None:
        """Return the median of an attribute of Measurement."""
        return _median([getattr(one, figure) for one in self.of(what, side)])

    def ratio(self, what: str, side: str, other: str, own: str = "rate", others: str = "capacity") -> float | None:
        """Return the median of the round-by-round ratios of two figures of Measurement.

        A peer counts as if it used its core fully.
        """
        pairs = zip(self.of(what, side), self.of(what, other), strict=False)
        return _median([getattr(one, own) / getattr(two, others) for one, two in pairs if two.rate > 0])

    def cpu_us(self, what: str, side: str) -> float | None:
        """Return the CPU time per request, in microseconds."""
        answers = sum(len(one.took.ms) for one in self.of(what, side))
        spent_s = sum(one.cpu_s for one in self.of(what, side))
        return spent_s / answers * 1e6 if answers and spent_s else None

    def percentile(self, what: str, side: str, share: float, *, first: bool = False) -> float | None:
        """Return a percentile in ms, the median of the rounds; infinite where too much was lost."""
        return _median(self._percentiles(what, side, share, first))

    def added_ms(self, what: str, side: str, share: float, *, first: bool = False) -> float | None:
        """Return by how much a side's percentile exceeds that of the upstream alone: the median of the rounds."""
        return _median([own - alone for own, alone in self._beside_direct(what, side, share, first)])

    def _percentiles(self, what: str, side: str, share: float, first: bool) -> list[float]:
        tooks = [one.took for one in self.of(what, side)]
        return [percentile(took.first_ms if first else took.ms, share, took.lost) for took in tooks]

    def _beside_direct(self, what: str, side: str, share: float, first: bool) -> list[tuple[float, float]]:
        """Return a side's percentile and that of the upstream alone, by round."""
        own, alone = (self._percentiles(what, name, share, first) for name in (side, DIRECT))
        return [(one, two) for one, two in zip(own, alone, strict=False) if math.isfinite(two)]

    def longer(self, what: str, side: str) -> float | None:
        """Return how much longer a paced stream takes than the upstream's schedule, at the median; 0.05 is 5 %."""
        took = self.percentile(what, side, 0.5)
        return None if took is None else took / 1000 / PACED_S - 1

    def longer_than_alone(self, what: str, side: str) -> float | None:
        """Return how much longer it takes than from the upstream alone in the same round.

        The upstream alone is limited by its core too.
        """
        return _median([own / alone - 1 for own, alone in self._beside_direct(what, side, 0.5, False)])

    def lost(self, what: str, side: str) -> int:
        """Return the number of requests without a complete answer in time."""
        return sum(one.took.lost for one in self.of(what, side))

    def rss_bytes(self, side: str) -> int:
        """Return the largest resident memory when load ended."""
        return max((one.rss_bytes for sides in self.by.values() for one in sides.get(side, [])), default=0)

    def ratios(self) -> dict[str, float]:
        """Return the ratios that a baseline stores: rates relative to every other side, and the times of paced streams.

        Rates assume a fully used core: when other processes took the core, the proxy must not look slow.
        """
        ours = [(what, side) for what, sides in self.by.items() for side in sides if side.startswith("whetstone")]
        ratios = {
            f"{what}: {side} / {other}": self.ratio(what, side, other, "capacity")
            for what, side in ours
            for other in self.by[what]
            if what.startswith(RATES) and not other.startswith("whetstone")
        }
        for what, side in ours:
            if what.startswith("paced") and (longer := self.longer_than_alone(what, side)) is not None:
                ratios[f"{what}, time: {side} / {DIRECT}"] = 1 + longer
        return {name: round(ratio, 4) for name, ratio in ratios.items() if ratio is not None and math.isfinite(ratio)}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def percentile(values: Sequence[float], share: float, lost: int = 0) -> float:
    """Return the least value that this share of all does not exceed; lost requests count as infinite."""
    place = max(0, math.ceil(share * (len(values) + lost)) - 1)
    return math.inf if place >= len(values) else sorted(values)[place]


def worse(now: Mapping[str, float], baseline: Mapping[str, float], tolerance: float = TOLERANCE) -> list[str]:
    """Return the ratios that are worse than the baseline's by more than the tolerance. Rates should be high, times low.

    Ratios that only one of both has are not compared; if there is nothing to compare, that is a fault too.
    """
    worse_by = {
        name: (now[name] / was if ", time:" in name else was / max(now[name], 1e-9)) - 1
        for name, was in baseline.items()
        if name in now
    }
    if not worse_by:
        return ["nothing of the baseline was measured"]
    return [
        f"{name}: {now[name]:.3g}, was {baseline[name]:.3g}: {by:.0%} worse, {tolerance:.0%} may be"
        for name, by in worse_by.items()
        if by > tolerance
    ]


@dataclass(frozen=True)
class Bar:
    """A requirement."""

    name: str
    must: float
    aim: float | None
    value: float | None
    """None: not measured here."""
    least: bool = True
    """The value must be at least `must`; otherwise at most."""

    @property
    def holds(self) -> bool | None:
        return self._reaches(self.must)

    @property
    def aimed(self) -> bool | None:
        return None if self.aim is None else self._reaches(self.aim)

    def _reaches(self, bound: float) -> bool | None:
        if self.value is None:
            return None
        return self.value >= bound if self.least else self.value <= bound


def bars(figures: Figures, side: str = "whetstone", workers: str = "whetstone, 2 workers") -> list[Bar]:
    """Return the requirements for the proxy, with its values."""
    streams, each_bytes = figures.silent_streams.get(side, (None, None))
    share = figures.median("paced 128", side, "busy")
    memory = figures.rss_bytes(side)
    lost, many = (figures.lost("paced 400", side) if figures.of("paced 400", side) else None), "400 paced streams"
    rate = "requests/s, 16 connections"
    return [
        Bar(f"{rate}, of LiteLLM's", 35, 100, figures.ratio("plain 16", side, "litellm")),
        Bar(f"{rate}, of nginx's", 0.07, 0.2, figures.ratio("plain 16", side, "nginx", others="rate")),
        Bar(f"{rate}, of all nginx's core could do", 0.07, 0.2, figures.ratio("plain 16", side, "nginx")),
        Bar("27 KB captured, requests/s, of rLLM's", 10, 20, figures.ratio("large 16", side, "rllm")),
        Bar("streams/s, 16 connections, of LiteLLM's", 60, 200, figures.ratio("stream 16", side, "litellm")),
        Bar("1,000 requests/s, added p50, ms", 0.3, 0.12, figures.added_ms("open", side, 0.5), least=False),
        Bar("1,000 requests/s, added p99, ms", 3, 0.8, figures.added_ms("open", side, 0.99), least=False),
        Bar("first event later by, p50, ms", 0.5, None, figures.added_ms("first", side, 0.5, first=True), least=False),
        Bar("128 paced streams, share of the core", 0.6, 0.37, share, least=False),
        Bar("128 paced streams, longer by", 0.05, 0.01, figures.longer_than_alone("paced 128", side), least=False),
        Bar(f"{many}, longer by", 0.15, None, figures.longer_than_alone("paced 400", side), least=False),
        Bar(f"{many}, lost", 0, None, lost, least=False),
        Bar("CPU us a request, 16 connections", 200, 65, figures.cpu_us("plain 16", side), least=False),
        Bar("resident under load, MiB", 200e6 / 2**20, None, memory / 2**20 if memory else None, least=False),
        Bar("streams that are silent, held at once", 2000, None, streams),
        Bar("memory of each, KiB", 64, None, None if each_bytes is None else each_bytes / 1024, least=False),
        Bar("two workers, requests/s of one's", 1.7, None, figures.ratio("plain 64", workers, side, others="rate")),
    ]


def as_json(figures: Figures, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything, for a file."""
    by_measurement = {
        what: {
            side: {
                "requests_per_s": [round(one.rate, 1) for one in rounds],
                "core": [round(one.busy, 3) for one in rounds],
                "p50_ms": figures.percentile(what, side, 0.5),
                "p99_ms": figures.percentile(what, side, 0.99),
                "first_p50_ms": figures.percentile(what, side, 0.5, first=True),
                "cpu_us": figures.cpu_us(what, side),
                "lost": figures.lost(what, side),
                "opened": sum(one.opened for one in rounds),
            }
            for side, rounds in measured.items()
        }
        for what, measured in figures.by.items()
    }
    return {
        "machine": dict(machine),
        "figures": by_measurement,
        "rss_bytes": {side: figures.rss_bytes(side) for side in sorted(figures.sides())},
        "highest_rss_bytes": figures.highest_rss,
        "held": {
            side: {"streams": count, "bytes_each": each} for side, (count, each) in figures.silent_streams.items()
        },
        "bars": {bar.name: {"value": bar.value, "must": bar.must, "holds": bar.holds} for bar in bars(figures)},
        "ratios": figures.ratios(),
    }
