"""Evaluate the alert rules over what was scraped, by Prometheus' own promtool."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kit.process import ROOT

RULES = ROOT / "containers" / "prometheus" / "alerts.yml"
EVALUATED_EVERY_S = 15
"""As containers/prometheus/prometheus.yml has it."""
COUNTS_S = 10
"""How long a scrape counts where no other follows."""
UP = 'up{job="whetstone"}'


@dataclass(frozen=True)
class Scrape:
    """What /metrics reported."""

    at_s: float
    """Since the first one."""
    series: Mapping[str, float] = field(default_factory=dict)
    """By name and labels; none: it did not answer in time."""


class NoPromtool(Exception):
    """promtool is not installed."""


def parse(text: str) -> dict[str, float]:
    """Return the proxy's own series of a page in Prometheus' text format, without histograms."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("whetstone_"))
    return {name: float(value) for name, _, value in lines if "_bucket" not in name}


def fires(
    scrapes: Sequence[Scrape], alert: str, at_s: float, stays_s: int = 0, growth: Mapping[str, float] | None = None
) -> bool:
    """Return whether an alert fires at this time, or `stays_s` later, while everything stays as it was at this time.

    `growth`: of series that grow meanwhile, how much a second. Both are for rules that wait for minutes.

    Raises:
        NoPromtool: it is not installed.
    """
    grid = list(_by_second(scrapes, int(at_s)))
    names = sorted({name for one in grid if one for name in one.series})
    series = [
        {"series": UP, "values": _values([None if one is None else float(bool(one.series)) for one in grid], stays_s)}
    ]
    for name in names:
        values = [one.series.get(name) if one else None for one in grid]
        series.append({"series": name, "values": _values(values, stays_s, (growth or {}).get(name, 0.0))})
    expected = {
        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) > bool 0',
        "eval_time": f"{int(at_s) + stays_s}s",
        "exp_samples": [{"labels": "{}", "value": 1}],
    }
    test = {"interval": "1s", "input_series": series, "promql_expr_test": [expected]}
    return _promtool({"rule_files": [str(RULES)], "evaluation_interval": f"{EVALUATED_EVERY_S}s", "tests": [test]})


def _promtool(tests: Mapping[str, object]) -> bool:
    """Return whether the expectations hold."""
    promtool = shutil.which("promtool")
    if promtool is None:
        raise NoPromtool("the alerts were not evaluated: no promtool here; `apt-get install prometheus` brings it")
    with tempfile.TemporaryDirectory(prefix="whetstone-alerts-") as folder:
        path = Path(folder) / "tests.yml"
        path.write_text(json.dumps(tests), encoding="utf-8")  # JSON is YAML
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode and "got:" not in output:
        raise ValueError(f"promtool could not evaluate the rules: {output}")
    return done.returncode == 0


def _values(values: Sequence[float | None], stays_s: int, growth: float = 0.0) -> str:
    # As Prometheus itself marks a series that a scrape no longer has.
    shown = " ".join("stale" if value is None else f"{value:.12g}" for value in values)
    last = values[-1]
    if not stays_s:
        return shown
    return f"{shown} {'_' if last is None else f'{last:.12g}{growth:+.12g}'}x{stays_s}"


def _by_second(scrapes: Sequence[Scrape], until_s: int) -> Iterator[Scrape | None]:
    """Yield the scrape that counts at each second."""
    place = -1
    for second in range(until_s + 1):
        while place + 1 < len(scrapes) and scrapes[place + 1].at_s <= second:
            place += 1
        one = scrapes[place] if place >= 0 else None
        yield one if one is not None and second - one.at_s <= COUNTS_S else None
