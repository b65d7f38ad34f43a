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
from collections.abc import Callable, Iterator
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
from benchmarks.kit.check import figures_table, verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.options import parser_of
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


def settings_of(data: Path, judge_url: str, args: argparse.Namespace, **given: Any) -> Settings:
    """Return settings of a stack that ranks every group and trains on none."""
    return load(
        environment={},
        data=data,
        seed=args.seed,
        database=args.database,
        proxy__port=0,
        groups__idle_s=2,
        judges={
            "local": {
                "model": "openai/scripted",
                "url": judge_url,
                "concurrency": args.concurrency,
                "timeout_s": TIMEOUT_S,
                "usd_per_million_prompt_tokens": PRICES[0],
                "usd_per_million_completion_tokens": PRICES[1],
            }
        },
        learning={"starter": {"ruler": {"judges": ["local"], "rank": "all", "judgements": args.judgements}}},
        **given,
    )


class Run:
    """One run on a stack that is up."""

    def __init__(self, stack: Stack, judge: ScriptedJudge, args: argparse.Namespace, console: Console) -> None:
        settings = stack.settings
        self._stack, self._judge, self._args, self._console = stack, judge, args, console
        self._min_spread, self._status = settings.learning_of(settings.policy).ruler.min_spread, ""
        self._records = Records(connect(settings.database_url), settings.project)
        slots = args.groups * args.judgements
        self._killer = Killer(settings.data / "up.json", judge, args.kills, slots, random.Random(args.seed))

    def go(self) -> tuple[dict[str, str], list[str]]:
        """Send requests, judge and kill; check; judge again; check again. Return the figures, and what does not hold.

        Raises:
            StartFailed: a program of the stack keeps ending.
        """
        args, killer, began = self._args, self._killer, time.monotonic()
        with self._asking() as asking:

            def over() -> bool:
                failed = sum(one.done() and one.exception() is not None for one in asking)
                recorded, judged = self._groups_now()
                self._status = f"{recorded} groups, {judged} judged"
                return judged >= args.groups - failed and judged == recorded

            faults = self._until(over, kill=True)
            judged_s = time.monotonic() - began
            answered = [one for one in asking if one.done()]
        failed = [str(one.exception()) for one in answered if one.exception() is not None]
        # Until the last group had been sampled.
        sampled_s = max((one.result() for one in answered if one.exception() is None), default=began) - began
        # Of the first run, the starts of its workers included.
        cpu_s, calls, ledger = killer.cpu_s, self._judge.calls, self._records.ledger()
        faults += present(
            {
                f"{len(failed)} calls failed, one with {next(iter(failed), None)}": failed,
                f"{killer.hits} kills, not {args.kills}: the judge was too fast, see --answer-s": (
                    killer.hits < args.kills
                ),
            }
        )
        may_be_lost = killer.hits * args.concurrency
        faults += wrong_with(ledger, args.groups, args.judgements, calls, may_be_lost, self._min_spread)
        again = time.monotonic()
        faults += self._again(ledger, calls)
        again_s = time.monotonic() - again
        stored = sum(one.calls for one in ledger.judgements)
        accepted = sum(one.state == "accepted" for one in ledger.judgements)
        discarded = sum(group.state == "discarded" for group in ledger.groups)
        groups, slots = len(ledger.groups), args.groups * args.judgements
        most = f"{slots} + {killer.hits} kills" + (f" × {args.concurrency} at once" if args.concurrency > 1 else "")
        figures = {
            "groups": f"{groups} of {SIZE} attempts in {sampled_s:.0f} s, {discarded} of them all too alike",
            "judgements": f"{accepted} accepted of {slots}",
            "calls": f"{calls}, at most {most}; {calls - stored} lost in kills",
            "judging": f"{judged_s:.0f} s, {groups / judged_s:.2f} groups/s, starts after kills too",
            "judging worker": f"{cpu_s:.0f} s of CPU, starts too, {cpu_s / judged_s:.0%} of a core",
            "judged again": f"{again_s:.0f} s, {groups / again_s:.1f} groups/s",
        }
        return figures, faults

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
                yield [pool.submit(ask, number) for number in range(self._args.groups)]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _again(self, ledger: Ledger, calls_before: int) -> list[str]:
        """Have every group ranked once more; return what does not hold."""
        group_of: dict[str, str] = {}
        with self._client() as client:
            for first in range(0, len(ledger.groups), BATCH):
                batch = [group.group_id for group in ledger.groups[first : first + BATCH]]
                body = [{"group_id": one, "judge": {"kind": "ruler"}} for one in batch]
                taken = client.post("/feedback", json=body).raise_for_status().json()
                group_of |= {feedback["id"]: one for feedback, one in zip(taken, batch, strict=True)}

        def became() -> dict[str, str]:
            states = self._records.ranking_feedback()
            return {one: states[one] for one in group_of if one in states}

        def over() -> bool:
            done = sum(state != "waiting" for state in became().values())
            recorded, judged = self._groups_now()
            self._status = f"{len(group_of)} groups to be judged again, {done} are"
            return done == len(group_of) and judged == recorded

        faults, calls = self._until(over, kill=False), self._judge.calls - calls_before
        return faults + wrong_again(ledger, self._records.ledger(), calls, group_of, became())

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


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether judges rank every group once, whatever is killed meanwhile.",
        {
            "--groups": {"type": int, "default": 1000, "help": f"of {SIZE} attempts each"},
            "--judgements": {"type": int, "default": 1, "help": "of each group"},
            "--kills": {"type": int, "default": 12, "help": "of the judging worker, while it judges"},
            "--concurrency": {
                "type": int,
                "default": 1,
                "help": "groups judged at once; a kill may cost as many calls",
            },
            "--answer-s": {"type": float, "default": 0.2, "help": "seconds the judge takes, times the concurrency"},
            "--seed": {"type": int, "default": 0, "help": "of the sampling and the moments of the kills"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--database": {"help": "URL of an empty database; without it SQLite in the data folder"},
        },
    )
    add_vllm_argument(parser)
    args = parser.parse_args()
    # Slow answers: kills must hit calls, and be spread over more time than the supervisor needs.
    judge = ScriptedJudge(lambda _number, _rng: "slow", slow_s=args.answer_s * args.concurrency, seed=args.seed)
    with judge, opened("judged", args.data) as (data, console), borrowed_vllm(args.vllm) as given:
        settings = settings_of(data, judge.url, args, **given)
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            figures, faults = Run(stack, judge, args, console).go()
    console.print(figures_table(figures))
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
