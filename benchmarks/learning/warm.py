"""Check that another server's answers warm a policy up, and that it continues to learn by itself.

Starts the whole stack and a scripted server that plays tic-tac-toe well. An agent plays as that teacher through the
proxy; a few supervised steps imitate the games it won; then the policy plays for itself and takes policy-gradient
steps. Held-out games are played by the base model, the warmed-up version and the last. Exit 0 only if the warm-up
raised the share of wins with certainty, the later steps did not lower it with certainty, each version's parent is the
one before it, and no request failed. Loopback only.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.fakes.teacher import Teacher
from benchmarks.kit.check import data_folder, end_on_sigterm
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.demo.agent_process import app, report_of, still_runs
from whetstone.demo.demo import AGENT
from whetstone.domain import stats
from whetstone.registry.projects import Store
from whetstone.stack.stack import Stack, running

POLL_S = 0.2


class Run:
    """One stack, and the actions on it."""

    def __init__(self, stack: Stack, console: Console) -> None:
        self._stack, self._console = stack, console
        self._settings = stack.settings
        self._store = Store(connect(stack.settings.database_url))
        self.failed_requests = 0

    def play(self, model: str, games: int, split: str) -> list[int]:
        """Play games to their end; return, for held-out games, which were won."""
        options = ["--seed", str(self._settings.seed), "--model", model, "--games", str(games), "--split", split]
        with app(self._stack, AGENT, options) as agent:
            report = report_of(agent, self._stack)
        self.failed_requests += report["failed_requests"]
        won: list[int] = report.get("won", [])
        return won

    def imitate(self, teacher: str, limit: int) -> None:
        """Take one supervised step on the teacher's won games, and wait for its end.

        Raises:
            httpx.HTTPStatusError: the proxy refuses.
        """
        before = len(self.steps)
        body = {"kind": "sft", "from": teacher, "min_reward": 1.0, "limit": limit}
        url = f"{self._stack.proxy_url}/admin/policies/{self._settings.policy}/step"
        httpx.post(url, json=body, timeout=30).raise_for_status()
        while len(self.steps) == before:
            self._stack.watch()
            time.sleep(POLL_S)
        self._tell(before)

    def learn(self, steps: int) -> None:
        """Let the policy play for itself until it has taken `steps` policy-gradient steps."""
        self._store.set_policy_state(self._settings.project, self._settings.policy, "training")
        begun = printed = len(self.steps)
        with app(self._stack, AGENT, ["--seed", str(self._settings.seed), "--games", "0"]) as agent:
            while printed < begun + steps:
                still_runs(agent)
                self._stack.watch()
                ended = len(self.steps)
                for number in range(printed, ended):
                    self._tell(number)
                printed = ended
                time.sleep(POLL_S)
            agent.terminate()
            self.failed_requests += report_of(agent, self._stack)["failed_requests"]
        self._store.set_policy_state(self._settings.project, self._settings.policy, "paused")

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps that are over."""
        steps = self._store.steps(self._settings.project, self._settings.policy)
        return [step for step in steps if step["ended_at"] is not None]

    @property
    def live(self) -> str:
        """The live version."""
        return self._store.live_name(self._settings)

    def _tell(self, number: int) -> None:
        step = self.steps[number]
        if step["state"] != "promoted":
            self._console.print(f"step {step['number']}  {step['state']}: {step['error']}")
            return
        self._console.print(
            f"step {step['number']}  {step['kind']}  v{step['version_in']} to v{step['version_out']}  "
            f"{step['completions']} answers in {step['rows']} rows  loss {step['loss']:.3f}  {step['seconds']:.1f} s",
            highlight=False,
        )


def one_line(steps: list[dict[str, Any]]) -> bool:
    """Return whether each version was made from the one before it."""
    made = [step for step in steps if step["state"] == "promoted"]
    return [step["version_in"] for step in made] == [0, *(step["version_out"] for step in made[:-1])]


def show(won: dict[str, list[int]], console: Console) -> None:
    """Print the table of the held-out games, by version."""
    games = list(won.values())
    table = Table("held-out games", "won", "95 % interval", "gain on the row above", title=f"{len(games[0])} openings")
    for place, name in enumerate(won):
        share = stats.share(games[place])
        gain = ""
        if place:
            more = stats.gain(games[place - 1], games[place])
            gain = f"{more.mean:+.1%} ({more.low:+.1%} to {more.high:+.1%})"
        table.add_row(name, f"{share.mean:.1%}", f"{share.low:.1%} to {share.high:.1%}", gain)
    console.print(table)


def settings_of(data: Path, seed: int, teacher: str) -> Settings:
    """Return settings of a stack whose policy `teacher` is the scripted server."""
    far = {"url": teacher, "models": {"teacher": "scripted"}}
    return load(environment={}, data=data, seed=seed, proxy__port=0, upstreams={"scripted": far})


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether imitation warms a policy up, and GRPO goes on from there.")
    parser.add_argument("--taught", type=int, default=512, help="games that the teacher plays")
    parser.add_argument("--warm", type=int, default=8, help="supervised steps on the games it won")
    parser.add_argument("--limit", type=int, default=256, help="games that one of them imitates")
    parser.add_argument("--steps", type=int, default=8, help="policy-gradient steps afterwards")
    parser.add_argument("--games", type=int, default=600, help="held-out games for each of the three versions")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter, the sampling and the openings")
    parser.add_argument("--data", type=Path, help="an empty folder for database and logs, which then stay")
    args = parser.parse_args()
    end_on_sigterm()
    console, began = Console(), time.monotonic()
    with data_folder("warm", args.data) as data, Teacher() as teacher:
        settings = settings_of(data, args.seed, teacher.url)
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            run = Run(stack, console)
            won = {run.live: run.play(run.live, args.games, "eval")}
            run.play("teacher", args.taught, "train")
            for _ in range(args.warm):
                run.imitate("teacher", args.limit)
            won[run.live] = run.play(run.live, args.games, "eval")
            run.learn(args.steps)
            won[run.live] = run.play(run.live, args.games, "eval")
            steps, failed_requests = run.steps, run.failed_requests
    show(won, console)
    console.print(f"{failed_requests} failed requests, {time.monotonic() - began:.0f} s")
    base, warmed, last = won.values()
    warmed_up, went_on = stats.gain(base, warmed), stats.gain(warmed, last)
    holds = warmed_up.low > 0 and went_on.high > 0 and one_line(steps) and not failed_requests
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
