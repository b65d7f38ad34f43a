"""Check that judges rank every group once: 1,000 groups of 8, a judging worker that is killed repeatedly.

Starts the whole stack and, in this process, a judge that computes the worth of every answer. Each group is one call
with eight choices. Kills the judging worker while it judges; then has every group ranked a second time. Exit 0 only if
each judgement was accepted once, calls ≤ judgements + kills × the judge's concurrency (a kill can lose the calls in
flight), every reward is the attempt's worth, and the second run made no call. Loopback only; Linux, for /proc.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.fakes.judge import ScriptedJudge
from benchmarks.faults.judged.records import SIZE, Ledger, Records, wrong_again, wrong_with
from benchmarks.kit import proc
from benchmarks.kit.check import data_folder, end_on_sigterm, figures_table, verdict
from benchmarks.kit.process import add_vllm_argument, borrowed_vllm
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.stack.stack import Stack, running
from whetstone.stack.supervisor import RESTART_WINDOW_S, RESTARTS

CONNECTIONS, MAX_TOKENS, BATCH = 8, 12, 500
ALIKE_EVERY = 25
"""One group in this many is sampled almost greedily: all its attempts are alike, and judges cannot rank them."""
TIMEOUT_S = 20.0
"""Setting `judges.local.timeout_s`."""
PRICES = 0.5, 2.0
"""US dollars per million tokens, prompt and completion."""
STILL_S = 240.0
"""If nothing changes for this long, the run fails: longer than the lease of a killed worker's groups and a start."""
TELL_S = 5.0
WINDOW_S = RESTART_WINDOW_S + 10
"""Fewer than RESTARTS kills in this time; otherwise the supervisor gives up."""


@dataclass
class Killer:
    """Kills the judging worker with SIGKILL, `kills` times, evenly over the calls of the run."""

    addresses: Path
    """`up.json`, which has its process id."""
    judge: ScriptedJudge
    kills: int
    slots: int
    rng: random.Random
    hits: int = 0
    """Kills of a running worker."""
    cpu_s: float = 0.0
    """CPU time of all workers so far."""
    _at: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS - 1))
    _calls_at_kill: int = 0
    _seen: tuple[int, float] = (0, 0.0)
    """Process id and CPU time of the present worker."""

    def look(self) -> None:
        """Kill, if enough calls of the run have been made, and some by this worker."""
        pid = json.loads(self.addresses.read_text())["pids"]["judge"]
        self._count(pid)
        calls = self.judge.calls
        due = self.hits < self.kills and calls >= self.slots * (self.hits + 1) / (self.kills + 1)
        too_soon = len(self._at) == self._at.maxlen and time.monotonic() - self._at[0] < WINDOW_S
        if not due or too_soon or calls <= self._calls_at_kill:
            return
        time.sleep(self.rng.random())  # to hit it at any point: in a call, in a transaction, between two groups
        self._count(pid)
        if proc.is_alive(pid):
            os.kill(pid, signal.SIGKILL)
            self.hits += 1
            self._at.append(time.monotonic())
        # Later calls come from another worker: all calls that this one had in flight were counted before.
        self._calls_at_kill = self.judge.calls

    def _count(self, pid: int) -> None:
        before_s = self._seen[1] if self._seen[0] == pid else 0.0
        cpu_s = max(before_s, proc.cpu_s(pid))
        self.cpu_s += cpu_s - before_s
        self._seen = pid, cpu_s


@dataclass(frozen=True)
class Outcome:
    """The result of the run."""

    ledger: Ledger
    faults: Sequence[str]
    calls: int
    """Calls of the first run."""
    kills: int
    sampled_s: float
    """Time until the last group had been sampled."""
    judged_s: float
    """Time from the first request until the last group was over."""
    cpu_s: float
    """CPU time of the judging workers in the first run, including their starts."""
    again_s: float


def settings_of(
    data: Path, judge_url: str, *, judgements: int, concurrency: int, seed: int, database: str | None, **given: Any
) -> Settings:
    """Return settings of a stack that ranks every group and trains on none."""
    judge = {
        "model": "openai/scripted",
        "url": judge_url,
        "concurrency": concurrency,
        "timeout_s": TIMEOUT_S,
        "usd_per_million_prompt_tokens": PRICES[0],
        "usd_per_million_completion_tokens": PRICES[1],
    }
    return load(
        environment={},
        data=data,
        seed=seed,
        database=database,
        proxy__port=0,
        groups__idle_s=2,
        judges={"local": judge},
        learning={"starter": {"ruler": {"judges": ["local"], "rank": "all", "judgements": judgements}}},
        **given,
    )


class Run:
    """One run on a stack that is up."""

    def __init__(self, stack: Stack, judge: ScriptedJudge, groups: int, kills: int, console: Console) -> None:
        settings = stack.settings
        self._stack, self._judge, self._groups, self._console = stack, judge, groups, console
        self._ruler = settings.learning_of(settings.policy).ruler
        self._at_once, self._status = settings.judges["local"].concurrency, ""
        self._records = Records(connect(settings.database_url), settings.project)
        slots = groups * self._ruler.judgements
        self._killer = Killer(settings.data / "up.json", judge, kills, slots, random.Random(settings.seed))

    def go(self) -> Outcome:
        """Send requests, judge and kill; check; judge again; check again.

        Raises:
            StartFailed: a program of the stack keeps ending.
        """
        began = time.monotonic()
        with self._asking() as asking:

            def over() -> bool:
                failed = sum(one.done() and one.exception() is not None for one in asking)
                recorded, judged = self._groups_now()
                self._status = f"{recorded} groups, {judged} judged"
                return judged >= self._groups - failed and judged == recorded

            faults = self._until(over, kill=True)
            judged_s = time.monotonic() - began
            answered = [one for one in asking if one.done()]
        failed = [str(one.exception()) for one in answered if one.exception() is not None]
        sampled_s = max((one.result() for one in answered if one.exception() is None), default=began) - began
        cpu_s, calls, ledger = self._killer.cpu_s, self._judge.calls, self._records.ledger()
        if failed:
            faults.append(f"{len(failed)} calls failed, one with {failed[0]}")
        if self._killer.hits < self._killer.kills:
            faults.append(
                f"{self._killer.hits} kills, not {self._killer.kills}: the judge was too fast, see --answer-s"
            )
        may_be_lost = self._killer.hits * self._at_once
        judgements, min_spread = self._ruler.judgements, self._ruler.min_spread
        faults += wrong_with(ledger, self._groups, judgements, calls, may_be_lost, min_spread)
        again = time.monotonic()
        faults += self._again(ledger, calls)
        again_s = time.monotonic() - again
        return Outcome(ledger, faults, calls, self._killer.hits, sampled_s, judged_s, cpu_s, again_s)

    @contextmanager
    def _asking(self) -> Iterator[list[Future[float]]]:
        """Request all groups meanwhile; each future returns the time of its answer."""
        settings = self._stack.settings

        def ask(number: int) -> float:
            # Equal groups would be judged once, and answered from the cache from then on.
            prompt = f"Tell me story {settings.seed}.{number}."
            body = {"model": settings.policy, "messages": [{"role": "user", "content": prompt}], "n": SIZE}
            body |= {"temperature": 0.01 if number % ALIKE_EVERY == 0 else 1, "max_tokens": MAX_TOKENS}
            client.post("/chat/completions", json=body).raise_for_status()
            return time.monotonic()

        with self._client() as client, ThreadPoolExecutor(CONNECTIONS) as pool:
            try:
                yield [pool.submit(ask, number) for number in range(self._groups)]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _again(self, ledger: Ledger, calls_before: int) -> list[str]:
        """Have every group ranked once more; return what does not hold."""
        group_of: dict[str, str] = {}
        with self._client() as client:
            for first in range(0, len(ledger.groups), BATCH):
                batch = [group.group_id for group in ledger.groups[first : first + BATCH]]
                response = client.post(
                    "/feedback", json=[{"group_id": one, "judge": {"kind": "ruler"}} for one in batch]
                )
                group_of |= {
                    taken["id"]: one for taken, one in zip(response.raise_for_status().json(), batch, strict=True)
                }
        became: dict[str, str] = {}

        def over() -> bool:
            feedback = self._records.ranking_feedback()
            became.update({one: feedback[one][1] for one in group_of if one in feedback})
            done = sum(state != "waiting" for state in became.values())
            recorded, judged = self._groups_now()
            self._status = f"{len(group_of)} groups to be judged again, {done} are"
            return done == len(group_of) and judged == recorded

        faults = self._until(over, kill=False)
        return faults + wrong_again(ledger, self._records.ledger(), self._judge.calls - calls_before, group_of, became)

    def _groups_now(self) -> tuple[int, int]:
        """Return how many groups are recorded, and how many of them are over."""
        states = self._records.states()
        return states.total(), states["scored"] + states["discarded"]

    def _until(self, over: Callable[[], bool], *, kill: bool) -> list[str]:
        """Keep the stack running until it is over; return a fault if nothing changes any more."""
        moved_at = printed_at = time.monotonic()
        before = ""
        while not over():
            self._stack.watch()
            if kill:
                self._killer.look()
            now = time.monotonic()
            status = f"{self._status}, {self._judge.calls} calls, {self._killer.hits} kills"
            if status != before:
                before, moved_at = status, now
            if now - moved_at > STILL_S:
                return [f"nothing has moved for {STILL_S:.0f} s: {status}"]
            if now - printed_at > TELL_S:
                printed_at = now
                self._console.print(f"[dim]{status}[/dim]", highlight=False)
            time.sleep(0.2)
        return []

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self._stack.proxy_url}/v1", timeout=120, trust_env=False)


def _show(outcome: Outcome, slots: int, concurrency: int, console: Console) -> None:
    groups, stored = outcome.ledger.groups, sum(one.calls for one in outcome.ledger.judgements)
    accepted = sum(one.state == "accepted" for one in outcome.ledger.judgements)
    discarded = sum(group.state == "discarded" for group in groups)
    most = f"{slots} + {outcome.kills} kills" + (f" × {concurrency} at once" if concurrency > 1 else "")
    figures = {
        "groups": f"{len(groups)} of {SIZE} attempts in {outcome.sampled_s:.0f} s, {discarded} of them all too alike",
        "judgements": f"{accepted} accepted of {slots}",
        "calls": f"{outcome.calls}, at most {most}; {outcome.calls - stored} lost in kills",
        "judging": f"{outcome.judged_s:.0f} s, {len(groups) / outcome.judged_s:.2f} groups/s, starts after kills too",
        "judging worker": f"{outcome.cpu_s:.0f} s of CPU, starts too, {outcome.cpu_s / outcome.judged_s:.0%} of a core",
        "judged again": f"{outcome.again_s:.0f} s, {len(groups) / outcome.again_s:.1f} groups/s",
    }
    console.print(figures_table(figures))


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description="Whether judges rank every group once, whatever is killed meanwhile.")
    parser.add_argument("--groups", type=int, default=1000, help=f"of {SIZE} attempts each")
    parser.add_argument("--judgements", type=int, default=1, help="of each group")
    parser.add_argument("--kills", type=int, default=12, help="of the judging worker, while it judges")
    parser.add_argument(
        "--concurrency", type=int, default=1, help="groups judged at once; a kill may cost as many calls"
    )
    parser.add_argument("--answer-s", type=float, default=0.2, help="seconds the judge takes, times the concurrency")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling and the moments of the kills")
    parser.add_argument("--data", type=Path, help="an empty folder for database and logs, which then stay")
    parser.add_argument("--database", help="URL of an empty database; without it SQLite in the data folder")
    add_vllm_argument(parser)
    args = parser.parse_args()
    end_on_sigterm()
    console = Console(width=120)
    # Slow answers: kills must hit calls, and be spread over more time than the supervisor needs.
    judge = ScriptedJudge(lambda _number, _rng: "slow", slow_s=args.answer_s * args.concurrency, seed=args.seed)
    with judge, data_folder("judged", args.data) as data, borrowed_vllm(args.vllm) as given:
        settings = settings_of(
            data,
            judge.url,
            judgements=args.judgements,
            concurrency=args.concurrency,
            seed=args.seed,
            database=args.database,
            **given,
        )
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            outcome = Run(stack, judge, args.groups, args.kills, console).go()
    _show(outcome, args.groups * args.judgements, args.concurrency, console)
    return verdict(outcome.faults, console)


if __name__ == "__main__":
    sys.exit(main())
