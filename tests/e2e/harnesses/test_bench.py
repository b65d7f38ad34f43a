"""The benchmark in its short form, its arithmetic, and that its checks can fail. Nothing here has to meet a time."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.bench import host as bench_host
from benchmarks.bench import instructions, report, start
from benchmarks.bench import upstream as bench_upstream
from benchmarks.bench.client import Target, wrong_with
from benchmarks.bench.figures import Bar, Figures, Measurement, bars, percentile, worse
from benchmarks.bench.load import LoadResult, Ticks, closed_loop, open_loop, silent_streams

ROOT = Path(__file__).resolve().parents[3]
PLAIN = bench_upstream.whole("plain", captured=False)
STREAM = b"".join(bench_upstream.events(captured=False))


@pytest.mark.slow
def test_connections_are_reused_and_each_request_is_a_row(tmp_path: Path) -> None:
    figures = tmp_path / "bench.json"
    command = [sys.executable, "-m", "benchmarks.bench", "--short", "--json", str(figures)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "it holds: no faults; the run was too short to judge the bars"
    assert "NO" not in run.stdout
    report_json = json.loads(figures.read_text())
    assert set(report_json["figures"]) == {"plain 16", "stream 16", "large 16", "open", "paced 128"}
    assert report_json["held"]["whetstone"]["streams"] == 200
    assert "plain 16: whetstone / direct" in report_json["ratios"]
    assert worse(report_json["ratios"], report_json["ratios"]) == []


@pytest.mark.long(part="harnesses")
@pytest.mark.slow
def test_a_run_that_misses_a_bar_says_so_last_and_exits_1() -> None:
    """It holds 100 silent streams at once; the bar is 2,000."""
    command = [sys.executable, "-m", "benchmarks.bench", "--only", "plain 1", "--forms", "whetstone", "--held", "100"]
    command += ["--rounds", "1", "--tries", "1", "--seconds", "0.3", "--nginx", ""]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    last = run.stdout.splitlines()[-1]
    assert last.startswith("it does not hold: ") and "streams that are silent, held at once" in last


def test_who_asks_does_not_share_the_core_of_a_peer(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    theirs = {min(before)}
    server = start.Peer(f"{sys.executable} -m http.server {{port}} --bind 127.0.0.1")
    with start.peer("other", server, "http://127.0.0.1:9", tmp_path, theirs) as side:
        assert os.sched_getaffinity(side.pids[0]) == theirs
        assert os.sched_getaffinity(0) == before


def measured(
    *, answers: int = 100, busy: float = 1.0, ms: float = 1.0, lost: int = 0, cpu_s: float = 0.0
) -> Measurement:
    """A round of one second."""
    return Measurement(LoadResult(1.0, [ms] * answers, [ms / 2] * answers, answers + lost, lost), cpu_s, busy)


@pytest.fixture
def run_figures() -> Figures:
    """Three rounds: the proxy at half of the upstream's rate, the second round out of order."""
    figures = Figures()
    for direct, own in ((100, 50), (100, 10), (200, 100)):
        figures.add("plain 16", "direct", measured(answers=direct, busy=0.0))
        figures.add("plain 16", "whetstone", measured(answers=own, cpu_s=own / 1000, ms=2.0))
        figures.add("plain 16", "nginx", measured(answers=direct, busy=0.5))
    return figures


class Cores:
    """A machine whose host takes a given number of ticks: of a hundred in each measurement."""

    def __init__(self, stat: Path) -> None:
        self._stat, self._working, self._stolen = stat, 0, 0
        self.pass_by(100, 100)

    def pass_by(self, worked: int, taken: int) -> None:
        self._working, self._stolen = self._working + worked, self._stolen + taken
        self._stat.write_text(f"cpu  {self._working} 1 2 3 4 5 6 {self._stolen} 999 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    async def measure(self, taken: Iterator[int]) -> int:
        """Return the stolen ticks, as the result of a measurement."""
        stolen = next(taken)
        self.pass_by(100 - stolen, stolen)
        return stolen


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cores:
    monkeypatch.setattr(bench_host, "STAT", tmp_path / "stat")
    return Cores(tmp_path / "stat")


def calmest_of(host: bench_host.Host, what: str, cores: Cores, *taken: int) -> int:
    return asyncio.run(host.calmest(what, partial(cores.measure, iter(taken))))


def test_time_that_the_host_took_is_reported_by_measurement(cores: Cores) -> None:
    host = bench_host.Host()
    for what, taken in (("open", 20), ("first", 1), ("open", 40)):
        assert calmest_of(host, what, cores, taken) == taken
        cores.pass_by(0, 1000)
    assert host.shares() == {"open": 0.3, "first": 0.01}
    (note,) = host.notes()
    assert "open 30%" in note and "first" not in note
    assert bench_host.Host().notes() == []


def test_what_the_host_disturbed_is_measured_again_and_the_calmest_counts(cores: Cores) -> None:
    host = bench_host.Host(tries=3)
    assert calmest_of(host, "open", cores, 30, 1, 0) == 1  # it was calm then: no further try
    assert calmest_of(host, "first", cores, 30, 10, 20, 0) == 10
    assert host.shares() == {"open": 0.01, "first": 0.1}
    again, taken = host.notes()
    assert again.startswith("3 times") and "first 10%" in taken and "open" not in taken


def test_a_ratio_is_the_median_of_the_rounds(run_figures: Figures) -> None:
    assert run_figures.ratio("plain 16", "whetstone", "direct") == 0.5


def test_who_was_not_busy_counts_with_all_of_its_core(run_figures: Figures) -> None:
    assert run_figures.ratio("plain 16", "whetstone", "nginx") == 0.25


def test_a_baseline_assumes_a_core_without_other_load(run_figures: Figures) -> None:
    run_figures.by["plain 16"]["whetstone"] = [measured(answers=25, busy=0.5)] * 3
    assert run_figures.ratios()["plain 16: whetstone / direct"] == 0.5
    assert run_figures.ratio("plain 16", "whetstone", "direct") == 0.25


def test_what_was_not_measured_has_no_figure(run_figures: Figures) -> None:
    assert run_figures.ratio("plain 16", "whetstone", "litellm") is None
    assert run_figures.added_ms("open", "whetstone", 0.5) is None
    assert {bar.holds for bar in bars(run_figures) if "LiteLLM" in bar.name} == {None}


def test_cpu_is_of_all_rounds_together(run_figures: Figures) -> None:
    assert run_figures.cpu_us("plain 16", "whetstone") == pytest.approx(1000)


def test_a_delay_is_the_median_of_the_rounds() -> None:
    figures = Figures()
    for own, alone in ((3.0, 1.0), (90.0, 80.0), (4.0, 1.0)):
        figures.add("open", "direct", measured(ms=alone))
        figures.add("open", "whetstone", measured(ms=own))
    assert figures.added_ms("open", "whetstone", 0.99) == 3.0
    assert figures.added_ms("open", "whetstone", 0.5, first=True) == 1.5


def test_a_paced_stream_is_compared_with_the_upstream_alone() -> None:
    figures = Figures()
    figures.add("paced 128", "direct", measured(ms=800.0))
    figures.add("paced 128", "whetstone", measured(ms=840.0))
    assert figures.longer_than_alone("paced 128", "whetstone") == pytest.approx(0.05)
    assert figures.longer("paced 128", "whetstone") == pytest.approx(840 / 640 - 1)
    assert figures.ratios() == {"paced 128, time: whetstone / direct": 1.05}


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([float(one) for one in range(100, 0, -1)], share) == value


def test_what_was_lost_took_forever() -> None:
    assert percentile([1.0] * 99, 0.99, lost=1) == 1.0
    assert percentile([1.0] * 98, 0.99, lost=2) == math.inf
    assert percentile([], 0.5) == math.inf


def test_a_bar_holds_on_its_own_side() -> None:
    assert Bar("a rate", 40, 100, 40).holds and not Bar("a rate", 40, 100, 40).aimed
    assert Bar("a time", 3, None, 3.1, least=False).holds is False
    assert Bar("a time", 3, None, math.inf, least=False).holds is False


@pytest.fixture
def reaching() -> Figures:
    """A run in which each bar holds that it measured."""
    figures = Figures()
    figures.add("open", "direct", measured(ms=1.0))
    figures.add("open", "whetstone", measured(ms=1.2))
    figures.silent_streams["whetstone"] = (2000, 10_000.0)
    return figures


def test_the_last_line_and_the_exit_code_follow_from_the_bars(reaching: Figures) -> None:
    holds, line = report.verdict([], bars(reaching))
    assert holds and line.startswith("it holds: no faults, 4 bars reached")
    reaching.silent_streams["whetstone"] = (1999, 10_000.0)
    holds, line = report.verdict([], bars(reaching))
    assert not holds
    assert line == "it does not hold: 1 of 4 bars missed (streams that are silent, held at once)"


def test_the_last_line_and_the_exit_code_follow_from_the_faults_too(reaching: Figures) -> None:
    assert report.verdict(["a wrong answer"], bars(reaching)) == (False, "it does not hold: 1 fault")


def test_a_bar_that_was_not_measured_is_counted_as_that(run_figures: Figures) -> None:
    unmeasured = [bar for bar in bars(run_figures) if bar.holds is None]
    holds, line = report.verdict([], unmeasured)
    assert holds and line.endswith(f"0 bars reached, {len(unmeasured)} not measured")


BASELINE = {"plain 16: whetstone / direct": 0.2, "paced 128, time: whetstone / direct": 1.0}


@pytest.mark.parametrize(
    ("now", "faults"),
    [
        ({}, 0),
        ({"plain 16: whetstone / direct": 0.15}, 0),
        ({"plain 16: whetstone / direct": 0.14}, 1),
        ({"plain 16: whetstone / direct": 0.0}, 1),
        ({"plain 16: whetstone / direct": 9.0}, 0),
        ({"paced 128, time: whetstone / direct": 1.34}, 0),
        ({"paced 128, time: whetstone / direct": 1.36}, 1),
        ({"paced 128, time: whetstone / direct": 0.5}, 0),
    ],
)
def test_a_ratio_that_is_worse_by_more_than_may_be_is_a_fault(now: dict[str, float], faults: int) -> None:
    assert len(worse({**BASELINE, **now}, BASELINE)) == faults


def test_a_check_that_compares_nothing_is_a_fault() -> None:
    assert worse({"plain 16: whetstone / nginx": 0.1}, BASELINE) == ["nothing of the baseline was measured"]


@pytest.mark.parametrize(
    ("kind", "status", "body", "fault"),
    [
        ("plain", 200, PLAIN, None),
        ("stream", 200, STREAM, None),
        ("plain", 500, PLAIN, "500"),
        ("plain", 200, b"{", "no answer of a chat"),
        ("plain", 200, PLAIN.replace(b"says", b"sa"), "characters were due"),
        ("plain", 200, bench_upstream.whole("plain", captured=True), "were not requested"),
        ("stream", 200, STREAM.removesuffix(b"data: [DONE]\n\n"), "without its end"),
        ("stream", 200, b"".join(bench_upstream.events(captured=False)[1:]), "characters were due"),
        ("stream", 200, b"".join(bench_upstream.events(captured=True)), "were not requested"),
    ],
)
def test_a_wrong_answer_is_a_fault(kind: str, status: int, body: bytes, fault: str | None) -> None:
    reported = wrong_with(kind, status, body)
    assert reported is None if fault is None else reported is not None and fault in reported


async def serving() -> tuple[Target, bench_upstream.Upstream, asyncio.Server]:
    """The upstream within this process."""
    upstream = bench_upstream.Upstream()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: bench_upstream.Connection(upstream), "127.0.0.1", 0)
    return Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "bench"), upstream, server


def test_every_way_of_asking_gets_its_answers() -> None:
    async def ask() -> None:
        target, upstream, server = await serving()
        async with server:
            for kind in ("plain", "large", "stream", "first", "paced"):
                took = await closed_loop(target, kind, 3, 0.05)
                assert (took.faults, took.lost, len(took.ms)) == ([], 0, took.sent), kind
            assert upstream.accepted == 15
            took = await open_loop(target, "plain", rate=200, seconds=0.25)
            assert (took.faults, took.lost, took.sent, len(took.ms)) == ([], 0, 50, 50)
            async with silent_streams(target, 20) as took:
                assert (took.lost, upstream.open_streams) == (0, 20)
            async with asyncio.timeout(5):
                while upstream.open_streams:
                    await asyncio.sleep(0.01)

    asyncio.run(ask())


class HangsUp(asyncio.Protocol):
    """A server that takes no request."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Late(asyncio.Protocol):
    """A server that takes a fifth of a second for each answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, _data: bytes) -> None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(PLAIN), PLAIN)
        asyncio.get_running_loop().call_later(0.2, self._transport.write, answer)  # type: ignore[attr-defined]


async def load_on(server: type[asyncio.Protocol], ask: Callable[[Target], Awaitable[LoadResult]]) -> LoadResult:
    """Return the result of load on a server of that kind."""
    async with await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0) as listening:
        return await ask(Target(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "bench"))


def test_a_connection_that_breaks_off_is_a_fault() -> None:
    took = asyncio.run(load_on(HangsUp, lambda target: closed_loop(target, "plain", 2, 0.1)))
    assert "a connection broke off" in took.faults[0]


def test_an_answer_that_is_due_while_others_are_slow_takes_from_then_on() -> None:
    """64 connections, each answered after 0.2 s: of 100 due within 0.1 s the last 36 wait for the first."""
    took = asyncio.run(load_on(Late, lambda target: open_loop(target, "plain", rate=1000, seconds=0.1)))
    assert (took.sent, took.lost, took.faults) == (100, 0, [])
    # They are sent 0.2 s after the first were, at least, and are due 0.1 s after those, at most.
    assert min(took.ms) >= 190 and sum(one >= 300 for one in took.ms) >= 36


def test_ticks_are_due_one_interval_apart() -> None:
    ticks = Ticks(0.002)
    assert ticks.due_s(3) - ticks.due_s(2) == pytest.approx(0.002)
    ticks.close()


def test_instructions_are_read_thread_by_thread(tmp_path: Path) -> None:
    (tmp_path / "callgrind.1-01").write_text("version: 1\nsummary: 0\n\nfn=(1) f\n1 5\n\ntotals: 500\n")
    (tmp_path / "callgrind.1-03").write_text("version: 1\nsummary: 0\n\ntotals: 700\n")
    (tmp_path / "callgrind").write_text("")
    assert list(instructions.read(tmp_path).items()) == [("03", 700), ("01", 500)]
