"""Check that adapter swaps are not felt: 50 under load, vLLM killed, a load that fails on one of two servers.

Starts the stack as `whetstone up` does, with the starter and two sets of random adapters that are far apart; 16
connections send requests all the time, half of them streams; versions are promoted by the admin route. Exit 0 only if
no request failed, every completion matches its recorded version (computed again by the trainer's learner; planted mixes
of two versions must be caught), no older version answered once a newer one had, and waits for the first token during a
swap are at most 1.5 times those without. Loopback only; needs no GPU.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.kit.check import data_folder, end_on_sigterm, verdict
from benchmarks.swaps.figures import RequestOutcome, Swap, late, percentile, stalls, stepped_back, waits
from benchmarks.swaps.load import Load, first_messages
from benchmarks.swaps.records import judge, mixes, recorded, unmixed
from benchmarks.swaps.scene import NONE, SETTLE_S, Scene, kill, running_scene, settings_of, unlike_servers, until
from whetstone.domain.ids import version_id

PARTS = ("swaps", "killed", "two", "refused")
APART_NATS = 0.5
MOST_WAIT_RATIO = 1.5
MIXES, SHORT_SWAPS = 18, 8
WARM_S, AFTER_S = 3.0, 3.0
RESTART_S = 240.0
ELSEWHERE_S = 10.0
"""Longest wait for a whole answer while one of two servers is away."""


@dataclass
class Report:
    """The result of a part: figures to print, and what does not hold."""

    title: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def figure(self, what: str, value: str) -> None:
        """Add a figure to print."""
        self.figures.append((what, value))

    def hold(self, holds: bool, fault: str) -> None:
        """Record a fault if it does not hold."""
        if not holds:
            self.faults.append(f"{self.title}: {fault}")


def plant(scene: Scene, report: Report) -> None:
    """Measure the distance of the versions, and check that mixes of two are caught and nothing else is."""
    control, base = next(iter(scene.controls.values())), scene.settings.served_name
    names = [base, "swaps-a", "swaps-b"]
    rng = random.Random(scene.settings.seed)
    prompts = [control.render(base, first_messages(rng), opened=True) for _ in range(MIXES)]
    for name, folder in zip(names[1:], scene.sets.folders, strict=True):
        control.load(name, folder)
    apart = scene.sets.distances(control, names, prompts)
    planted = mixes(control, names, prompts, MIXES)
    alone = judge(unmixed(control, names, prompts, MIXES), scene.sets)
    for name in names[1:]:
        control.unload(name)
    caught = [[bool(judge([completion], scene.sets).misfits) for completion in pair] for pair in planted]
    report.figure("nats a token between", ", ".join(f"{pair}: {nats:.2f}" for pair, nats in apart.items()))
    report.figure(
        "planted mixes of two versions",
        f"{sum(map(all, caught))} of {len(caught)} caught, whichever version is recorded; {len(alone.misfits)} of "
        f"{alone.completions} of one version flagged",
    )
    report.hold(min(apart.values()) >= APART_NATS, f"the adapters are only so far apart: {apart}")
    report.hold(all(map(all, caught)), "a planted mix was not caught")
    report.hold(not alone.misfits, f"completions of one version were flagged: {alone.misfits[:3]}")


async def swapping(scene: Scene, report: Report, swaps: int, every_s: float, connections: int, timed: bool) -> None:
    """Promote one version after the other under load."""
    apps, done, most_loaded = Load(scene.url, scene.settings.policy, connections, scene.settings.seed), list[Swap](), 0
    async with apps.running():
        await asyncio.sleep(WARM_S)
        warm_at = time.monotonic()
        for version in range(1, swaps + 1):
            swap, answer = await asyncio.to_thread(scene.promote, version)
            if answer.status_code != 200:
                report.hold(False, f"version {version} was not promoted: {answer.text[:300]}")
                break
            done.append(swap)
            most_loaded = max(most_loaded, await asyncio.to_thread(scene.most_loaded))
            await asyncio.sleep(every_s)
    _report_requests(apps.outcomes, report)
    report.hold(not any(outcome.failed for outcome in apps.outcomes), "requests failed")
    answered_by = {outcome.version for outcome in apps.outcomes}
    silent = sorted({swap.version for swap in done} - answered_by)
    report.hold(not silent, f"versions that answered no request: {silent}")
    report.hold(
        not late(apps.outcomes, done),
        f"{late(apps.outcomes, done)} trajectories began on an older version after a switch",
    )
    took = [swap.live_at - swap.load_at for swap in done]
    report.figure(
        "swaps", f"{len(done)}; {_seconds(took)} each from the request to live; {most_loaded} models loaded at most"
    )
    _report_waits([outcome for outcome in apps.outcomes if outcome.began_at > warm_at], done, report, timed)
    await _settled(scene, apps.outcomes, report)


async def killing(scene: Scene, report: Report, victim: str, connections: int, seed: int) -> None:
    """Kill a server under load, and continue until it is back with its adapters."""
    live, apps = scene.live(), Load(scene.url, scene.settings.policy, connections, seed)
    before = scene.pids[victim]
    async with apps.running():
        await asyncio.sleep(WARM_S)
        in_flight, killed_at = apps.in_flight, time.monotonic()
        gone_at = await asyncio.to_thread(kill, before)
        await until(lambda: scene.pids[victim] != before, RESTART_S, f"{victim} was not started again")
        await until(lambda: not scene.lacking(), RESTART_S, f"{victim} has not the adapters that it should have")
        back_at = time.monotonic()
        await asyncio.sleep(AFTER_S)
    _report_requests(apps.outcomes, report)
    failed = [outcome for outcome in apps.outcomes if outcome.failed]
    after = [outcome for outcome in apps.outcomes if outcome.began_at > gone_at]
    away = [outcome for outcome in after if outcome.ended_at < back_at and outcome.whole]
    longest_s = max(
        (outcome.ended_at - outcome.began_at for outcome in after if outcome.began_at < back_at), default=0.0
    )
    meanwhile = sum(killed_at < outcome.began_at <= gone_at for outcome in failed)
    report.figure(
        "killed",
        f"{victim}, {in_flight} requests in flight; {len(failed)} failed, {meanwhile} of them sent in the "
        f"{1000 * (gone_at - killed_at):.0f} ms that its process took to end; back after {back_at - gone_at:.0f} s; "
        f"until then {len(away)} answered, longest wait {longest_s:.1f} s",
    )
    report.hold(in_flight > 0, "nothing was in flight when the server was killed")
    report.hold(all(outcome.honest for outcome in failed), "a request failed without an honest error")
    new_failed = [outcome for outcome in after if outcome.failed]
    first_s = min((outcome.began_at - gone_at for outcome in new_failed), default=0.0)
    report.hold(
        not new_failed,
        f"{len(new_failed)} requests failed that were sent after the server was gone, the first after "
        f"{1000 * first_s:.0f} ms: {_why(new_failed)}",
    )
    wrong = {outcome.version for outcome in apps.outcomes if outcome.new and outcome.version not in (None, live)}
    report.hold(not wrong, f"new trajectories were answered by versions {wrong}, live is {live}")
    if len(scene.controls) > 1:
        report.hold(bool(away), "no request was answered while one server was away")
        report.hold(longest_s < ELSEWHERE_S, f"a request waited {longest_s:.1f} s though a server was there")
    await _settled(scene, apps.outcomes, report)


async def refusing(scene: Scene, report: Report, connections: int) -> None:
    """Promote a version that one of two servers refuses, make it live anyway, then promote one that both load."""
    apps, strict = Load(scene.url, scene.settings.policy, connections, scene.settings.seed), list(scene.controls)[1]
    refused = {strict: version_id(scene.settings.policy, 1)}
    async with apps.running():
        await asyncio.sleep(WARM_S)
        attempt, answer = await asyncio.to_thread(scene.promote, 1)
        report.hold(
            answer.status_code >= 400 and scene.live() == 0, f"promoted though one refuses it: {answer.text[:300]}"
        )
        took_s = attempt.live_at - attempt.load_at
        report.figure(
            "promote what one server refuses", f"{answer.status_code} after {took_s:.1f} s, live is {scene.live()}"
        )
        first = await asyncio.to_thread(scene.make_live, 1)
        await asyncio.sleep(max(0.0, first.live_at - time.monotonic()) + AFTER_S)
        states = ", ".join(f"{url} {state}" for url, state in scene.replicas().items())
        report.figure("made live all the same", f"live is {scene.live()}; {states}")
        second, answer = await asyncio.to_thread(scene.promote, 2)
        report.hold(answer.status_code == 200, f"a version that both take was not promoted: {answer.text[:300]}")
        before = await asyncio.to_thread(scene.sampled, strict)
        await asyncio.sleep(AFTER_S)
        since = await asyncio.to_thread(scene.sampled, strict) - before
        report.figure(
            "then one that both take", f"live is {scene.live()}; the server that refused sampled {since:.0f} tokens"
        )
        report.hold(since > 0, "the server that refused a version answers no request after the next")
    _report_requests(apps.outcomes, report)
    report.hold(not any(outcome.failed for outcome in apps.outcomes), f"requests failed: {_why(apps.outcomes)}")
    between = {
        outcome.version
        for outcome in apps.outcomes
        if outcome.new and first.live_at < outcome.began_at < second.load_at
    }
    report.hold(between == {1}, f"answered by {between} while 1 was live and one server had it")
    report.hold(not late(apps.outcomes, [first, second]), "a new trajectory began on an older version after a switch")
    await _settled(scene, apps.outcomes, report, refused)


async def _settled(
    scene: Scene, outcomes: Sequence[RequestOutcome], report: Report, refused: Mapping[str, str] = NONE
) -> None:
    """Check what must hold at the end of every part: records, versions of the answers, loaded adapters."""
    try:
        await scene.written()
        await until(lambda: not scene.lacking(refused), SETTLE_S, "the servers have not what the ledger says")
    except TimeoutError as error:
        report.hold(False, f"{error}: {scene.lacking(refused)}")
    back = stepped_back(outcomes)
    report.hold(not back, f"{len(back)} new trajectories met an older version than one that had answered: {back[:5]}")
    completions = recorded(scene.reader, scene.settings)
    verdict = await asyncio.to_thread(judge, completions, scene.sets)
    report.figure(
        "computed again",
        f"{verdict.completions} completions, {verdict.tokens} tokens, {len(verdict.misfits)} not of their version; "
        f"largest mean |Δ| of a half {verdict.worst_gap:.1e} nats",
    )
    report.hold(
        not verdict.misfits, f"{len(verdict.misfits)} completions are not their version's: {verdict.misfits[:3]}"
    )
    versions = {completion.name: completion.version for completion in completions}
    answered = [outcome for outcome in outcomes if outcome.whole]
    missing = [outcome.completion_id for outcome in answered if outcome.completion_id not in versions]
    report.hold(not missing, f"{len(missing)} answers have no record, {missing[:1]} among them")
    other = [outcome for outcome in answered if versions.get(outcome.completion_id, outcome.version) != outcome.version]
    report.hold(not other, f"{len(other)} answers name another version than their record")


def _report_requests(outcomes: Sequence[RequestOutcome], report: Report) -> None:
    streams = sum(outcome.streamed for outcome in outcomes)
    turns = sum(not outcome.new for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome.failed]
    report.figure(
        "requests", f"{len(outcomes)}, {streams} streams, {turns} later turns; {len(failed)} failed {_why(failed)}"
    )


def _why(outcomes: Sequence[RequestOutcome]) -> str:
    errors = sorted({outcome.error for outcome in outcomes if outcome.failed})
    return f"({'; '.join(why[:80] for why in errors[:3])})" if errors else ""


def _report_waits(outcomes: Sequence[RequestOutcome], done: Sequence[Swap], report: Report, timed: bool) -> None:
    during, other = waits(outcomes, done)
    p99, other_p99 = percentile(during, 0.99), percentile(other, 0.99)
    ratio = p99 / other_p99
    report.figure(
        "first token in ms, p99",
        f"{1000 * p99:.0f} of {len(during)} streams during a swap, {1000 * other_p99:.0f} of {len(other)} others: "
        f"{ratio:.2f} times; p50 {1000 * percentile(during, 0.5):.0f} and {1000 * percentile(other, 0.5):.0f}",
    )
    gap, other_gap = stalls(outcomes, done)
    report.figure(
        "swap gap", f"longest stall of a stream {1000 * gap:.0f} ms during a swap, {1000 * other_gap:.0f} ms else"
    )
    if timed:
        report.hold(ratio <= MOST_WAIT_RATIO, f"the first token takes {ratio:.2f} times as long during a swap")


def _seconds(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.5):.2f} s (at most {max(values, default=0):.2f})"


@contextlib.contextmanager
def reported(title: str, faults: list[str], console: Console) -> Iterator[Report]:
    """Yield a report that is printed at the end; what does not hold is added to `faults`."""
    report = Report(title)
    try:
        yield report
    except TimeoutError as error:
        report.hold(False, str(error))
    table = Table(title=title, show_header=False, title_justify="left")
    for what, value in report.figures:
        table.add_row(what, escape(value))
    console.print(table, f"[dim]load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}[/dim]")
    faults.extend(report.faults)


def prove(data: Path, parts: Sequence[str], args: argparse.Namespace, console: Console) -> list[str]:
    """Run the parts; return what does not hold."""
    faults: list[str] = []
    connections, seed, every_s = args.connections, args.seed, args.every
    settings = settings_of(data / "one", seed)
    full = settings.trainer.lora_rank
    if {"swaps", "killed"}.intersection(parts):
        with running_scene(settings, (full, full), console) as scene:
            if "swaps" in parts:
                with reported("one server, swaps", faults, console) as report:
                    plant(scene, report)
                    asyncio.run(swapping(scene, report, args.swaps, every_s, connections, timed=not args.short))
            if "killed" in parts:
                with reported("one server, killed", faults, console) as report:
                    asyncio.run(killing(scene, report, "vllm", connections, seed + 1))
    if "two" in parts:
        with running_scene(settings_of(data / "two", seed, vllm__replicas=2), (full, full), console) as scene:
            with reported("two servers, swaps", faults, console) as report:
                asyncio.run(swapping(scene, report, max(2, args.swaps // 5), every_s, connections, timed=False))
            with reported("two servers, one killed", faults, console) as report:
                asyncio.run(killing(scene, report, "vllm-1", connections, seed + 1))
    if "refused" in parts:
        settings = settings_of(data / "refused", seed)
        with unlike_servers(settings, data / "refused" / "servers", console) as urls:
            theirs = settings_of(data / "refused", seed, vllm__urls=urls)
            with (
                running_scene(theirs, (full, full // 2), console) as scene,
                reported("two servers, a load that fails on one", faults, console) as report,
            ):
                asyncio.run(refusing(scene, report, connections))
    return faults


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swaps", type=int, default=50, help="of one server; of two a fifth of them")
    parser.add_argument("--every", type=float, default=1.5, help="seconds from one switch to the next load")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the adapters and of the requests")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_SWAPS} swaps; times are shown and fail nothing")
    parser.add_argument("--data", type=Path, help="an empty folder for databases, adapters and logs, which then stay")
    args = parser.parse_args()
    if args.short:
        args.swaps = min(args.swaps, SHORT_SWAPS)
    if strange := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(strange))}; there are {', '.join(PARTS)}")
    end_on_sigterm()
    console = Console(width=120)
    with data_folder("swaps", args.data) as data:
        faults = prove(data, args.parts.split(","), args, console)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
