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

from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.options import parser_of
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
    faults: list[str]
    figures: dict[str, str] = field(default_factory=dict)

    def add(self, faults: Mapping[str, object]) -> None:
        """Record the faults whose condition is true."""
        self.faults += [f"{self.title}: {fault}" for fault in present(faults)]


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
    report.figures |= {
        "nats a token between": ", ".join(f"{pair}: {nats:.2f}" for pair, nats in apart.items()),
        "planted mixes of two versions": f"{sum(map(all, caught))} of {len(caught)} caught, whichever version is "
        f"recorded; {len(alone.misfits)} of {alone.completions} of one version flagged",
    }
    report.add(
        {
            f"the adapters are only so far apart: {apart}": not min(apart.values()) >= APART_NATS,
            "a planted mix was not caught": not all(map(all, caught)),
            f"completions of one version were flagged: {alone.misfits[:3]}": alone.misfits,
        }
    )


async def swapping(scene: Scene, report: Report, swaps: int, args: argparse.Namespace, timed: bool = False) -> None:
    """Promote one version after the other under load."""
    apps = Load(scene.url, scene.settings.policy, args.connections, args.seed)
    done, most_loaded = list[Swap](), 0
    async with apps.running():
        await asyncio.sleep(WARM_S)
        warm_at = time.monotonic()
        for version in range(1, swaps + 1):
            swap, answer = await asyncio.to_thread(scene.promote, version)
            if answer.status_code != 200:
                report.add({f"version {version} was not promoted: {answer.text[:300]}": True})
                break
            done.append(swap)
            most_loaded = max(most_loaded, await asyncio.to_thread(scene.most_loaded))
            await asyncio.sleep(args.every)
    _report_requests(apps.outcomes, report)
    silent = sorted({swap.version for swap in done} - {outcome.version for outcome in apps.outcomes})
    too_late = late(apps.outcomes, done)
    report.add(
        {
            "requests failed": any(outcome.failed for outcome in apps.outcomes),
            f"versions that answered no request: {silent}": silent,
            f"{too_late} trajectories began on an older version after a switch": too_late,
        }
    )
    took = [swap.live_at - swap.load_at for swap in done]
    warm = [outcome for outcome in apps.outcomes if outcome.began_at > warm_at]
    during, other = waits(warm, done)
    p99, other_p99 = percentile(during, 0.99), percentile(other, 0.99)
    ratio = p99 / other_p99
    gap, other_gap = stalls(warm, done)
    report.figures |= {
        "swaps": f"{len(done)}; {percentile(took, 0.5):.2f} s (at most {max(took, default=0):.2f}) each from the "
        f"request to live; {most_loaded} models loaded at most",
        "first token in ms, p99": f"{1000 * p99:.0f} of {len(during)} streams during a swap, {1000 * other_p99:.0f} of "
        f"{len(other)} others: {ratio:.2f} times; p50 {1000 * percentile(during, 0.5):.0f} and "
        f"{1000 * percentile(other, 0.5):.0f}",
        "swap gap": f"longest stall of a stream {1000 * gap:.0f} ms during a swap, {1000 * other_gap:.0f} ms else",
    }
    # `not <=`: a ratio without a measured stream is NaN, and must be a fault.
    report.add(
        {f"the first token takes {ratio:.2f} times as long during a swap": timed and not ratio <= MOST_WAIT_RATIO}
    )
    await _settled(scene, apps.outcomes, report)


async def killing(scene: Scene, report: Report, victim: str, args: argparse.Namespace) -> None:
    """Kill a server under load, and continue until it is back with its adapters."""
    live, apps = scene.live(), Load(scene.url, scene.settings.policy, args.connections, args.seed + 1)
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
    report.figures["killed"] = (
        f"{victim}, {in_flight} requests in flight; {len(failed)} failed, {meanwhile} of them sent in the "
        f"{1000 * (gone_at - killed_at):.0f} ms that its process took to end; back after {back_at - gone_at:.0f} s; "
        f"until then {len(away)} answered, longest wait {longest_s:.1f} s"
    )
    new_failed = [outcome for outcome in after if outcome.failed]
    first_ms = 1000 * min((outcome.began_at - gone_at for outcome in new_failed), default=0.0)
    wrong = {outcome.version for outcome in apps.outcomes if outcome.new and outcome.version not in (None, live)}
    others = len(scene.controls) > 1
    report.add(
        {
            "nothing was in flight when the server was killed": in_flight == 0,
            "a request failed without an honest error": not all(outcome.honest for outcome in failed),
            f"{len(new_failed)} requests failed that were sent after the server was gone, the first after "
            f"{first_ms:.0f} ms: {_why(new_failed)}": new_failed,
            f"new trajectories were answered by versions {wrong}, live is {live}": wrong,
            "no request was answered while one server was away": others and not away,
            f"a request waited {longest_s:.1f} s though a server was there": others and longest_s >= ELSEWHERE_S,
        }
    )
    await _settled(scene, apps.outcomes, report)


async def refusing(scene: Scene, report: Report, args: argparse.Namespace) -> None:
    """Promote a version that one of two servers refuses, make it live anyway, then promote one that both load."""
    apps = Load(scene.url, scene.settings.policy, args.connections, args.seed)
    strict = list(scene.controls)[1]
    async with apps.running():
        await asyncio.sleep(WARM_S)
        attempt, refusal = await asyncio.to_thread(scene.promote, 1)
        live = scene.live()
        took_s = attempt.live_at - attempt.load_at
        report.figures["promote what one server refuses"] = (
            f"{refusal.status_code} after {took_s:.1f} s, live is {live}"
        )
        first = await asyncio.to_thread(scene.make_live, 1)
        await asyncio.sleep(max(0.0, first.live_at - time.monotonic()) + AFTER_S)
        states = ", ".join(f"{url} {state}" for url, state in scene.replicas().items())
        report.figures["made live all the same"] = f"live is {scene.live()}; {states}"
        second, answer = await asyncio.to_thread(scene.promote, 2)
        before = await asyncio.to_thread(scene.sampled, strict)
        await asyncio.sleep(AFTER_S)
        since = await asyncio.to_thread(scene.sampled, strict) - before
        report.figures["then one that both take"] = (
            f"live is {scene.live()}; the server that refused sampled {since:.0f} tokens"
        )
    _report_requests(apps.outcomes, report)
    between = {
        outcome.version
        for outcome in apps.outcomes
        if outcome.new and first.live_at < outcome.began_at < second.load_at
    }
    report.add(
        {
            f"promoted though one refuses it: {refusal.text[:300]}": refusal.status_code < 400 or live != 0,
            f"a version that both take was not promoted: {answer.text[:300]}": answer.status_code != 200,
            "the server that refused a version answers no request after the next": since <= 0,
            f"requests failed: {_why(apps.outcomes)}": any(outcome.failed for outcome in apps.outcomes),
            f"answered by {between} while 1 was live and one server had it": between != {1},
            "a new trajectory began on an older version after a switch": late(apps.outcomes, [first, second]),
        }
    )
    await _settled(scene, apps.outcomes, report, {strict: version_id(scene.settings.policy, 1)})


async def _settled(
    scene: Scene, outcomes: Sequence[RequestOutcome], report: Report, refused: Mapping[str, str] = NONE
) -> None:
    """Check what must hold at the end of every part: records, versions of the answers, loaded adapters."""
    try:
        await scene.written()
        await until(lambda: not scene.lacking(refused), SETTLE_S, "the servers have not what the ledger says")
    except TimeoutError as error:
        report.add({f"{error}: {scene.lacking(refused)}": True})
    completions = recorded(scene.reader, scene.settings)
    verdict = await asyncio.to_thread(judge, completions, scene.sets)
    report.figures["computed again"] = (
        f"{verdict.completions} completions, {verdict.tokens} tokens, {len(verdict.misfits)} not of their version; "
        f"largest mean |Δ| of a half {verdict.worst_gap:.1e} nats"
    )
    back = stepped_back(outcomes)
    versions = {completion.name: completion.version for completion in completions}
    answered = [outcome for outcome in outcomes if outcome.whole]
    missing = [outcome.completion_id for outcome in answered if outcome.completion_id not in versions]
    other = [outcome for outcome in answered if versions.get(outcome.completion_id, outcome.version) != outcome.version]
    report.add(
        {
            f"{len(back)} new trajectories met an older version than one that had answered: {back[:5]}": back,
            f"{len(verdict.misfits)} completions are not their version's: {verdict.misfits[:3]}": verdict.misfits,
            f"{len(missing)} answers have no record, {missing[:1]} among them": missing,
            f"{len(other)} answers name another version than their record": other,
        }
    )


def _report_requests(outcomes: Sequence[RequestOutcome], report: Report) -> None:
    report.figures["requests"] = (
        f"{len(outcomes)}, {sum(outcome.streamed for outcome in outcomes)} streams, "
        f"{sum(not outcome.new for outcome in outcomes)} later turns; "
        f"{sum(outcome.failed for outcome in outcomes)} failed {_why(outcomes)}"
    )


def _why(outcomes: Sequence[RequestOutcome]) -> str:
    errors = sorted({outcome.error for outcome in outcomes if outcome.failed})
    return f"({'; '.join(why[:80] for why in errors[:3])})" if errors else ""


@contextlib.contextmanager
def reported(title: str, faults: list[str], console: Console) -> Iterator[Report]:
    """Yield a report, whose figures are printed at the end; it adds to `faults` what does not hold."""
    report = Report(title, faults)
    try:
        yield report
    except TimeoutError as error:
        report.add({str(error): True})
    table = Table(title=title, show_header=False, title_justify="left")
    for what, value in report.figures.items():
        table.add_row(what, escape(value))
    console.print(table, f"[dim]load average {', '.join(f'{load:.1f}' for load in os.getloadavg())}[/dim]")


def prove(data: Path, parts: Sequence[str], args: argparse.Namespace, console: Console) -> list[str]:
    """Run the parts; return what does not hold."""
    faults: list[str] = []
    settings = settings_of(data / "one", args.seed)
    full = settings.trainer.lora_rank
    if {"swaps", "killed"}.intersection(parts):
        with running_scene(settings, (full, full), console) as scene:
            if "swaps" in parts:
                with reported("one server, swaps", faults, console) as report:
                    plant(scene, report)
                    asyncio.run(swapping(scene, report, args.swaps, args, timed=not args.short))
            if "killed" in parts:
                with reported("one server, killed", faults, console) as report:
                    asyncio.run(killing(scene, report, "vllm", args))
    if "two" in parts:
        with running_scene(settings_of(data / "two", args.seed, vllm__replicas=2), (full, full), console) as scene:
            with reported("two servers, swaps", faults, console) as report:
                asyncio.run(swapping(scene, report, max(2, args.swaps // 5), args))
            with reported("two servers, one killed", faults, console) as report:
                asyncio.run(killing(scene, report, "vllm-1", args))
    if "refused" in parts:
        settings = settings_of(data / "refused", args.seed)
        with (
            unlike_servers(settings, data / "refused" / "servers", console) as urls,
            running_scene(
                settings_of(data / "refused", args.seed, vllm__urls=urls), (full, full // 2), console
            ) as scene,
            reported("two servers, a load that fails on one", faults, console) as report,
        ):
            asyncio.run(refusing(scene, report, args))
    return faults


def main() -> int:
    """Run the check."""
    parser = parser_of(
        __doc__.splitlines()[0],
        {
            "--swaps": {"type": int, "default": 50, "help": "of one server; of two a fifth of them"},
            "--every": {"type": float, "default": 1.5, "help": "seconds from one switch to the next load"},
            "--connections": {"type": int, "default": 16},
            "--seed": {"type": int, "default": 0, "help": "of the adapters and of the requests"},
            "--parts": {"default": ",".join(PARTS), "help": f"some of {','.join(PARTS)}"},
            "--short": {"action": "store_true", "help": f"{SHORT_SWAPS} swaps; times are shown and fail nothing"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    if args.short:
        args.swaps = min(args.swaps, SHORT_SWAPS)
    parts = args.parts.split(",")
    if strange := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(strange))}; there are {', '.join(PARTS)}")
    with opened("swaps", args.data) as (data, console):
        faults = prove(data, parts, args, console)
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
