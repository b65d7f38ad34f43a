"""Check that another server's answers warm a policy up, and that it continues to learn by itself.

Starts the whole stack and a scripted server that plays tic-tac-toe well. An agent plays as that teacher through the
proxy; a few supervised steps imitate the games it won; then the policy plays for itself and takes policy-gradient
steps. Held-out games are played by the base model, the warmed-up version and the last. Exit 0 only if the warm-up
raised the share of wins with certainty, the later steps did not lower it with certainty, each version's parent is the
one before it, and no request failed. Loopback only.
"""

import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.fakes.teacher import Teacher, next_move
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import LearningPolicy, cells
from whetstone.config.settings import Settings, load
from whetstone.demo.demo import AGENT
from whetstone.domain import stats
from whetstone.stack.stack import running


def _figures(step: dict[str, Any]) -> str:
    return (
        f"{step['kind']}  v{step['version_in']} to v{step['version_out']}  "
        f"{step['completions']} answers in {step['rows']} rows  loss {step['loss']:.3f}  {step['seconds']:.1f} s"
    )


def one_line(steps: list[dict[str, Any]]) -> bool:
    """Return whether each version was made from the one before it."""
    made = [step for step in steps if step["state"] == "promoted"]
    return [step["version_in"] for step in made] == [0, *(step["version_out"] for step in made[:-1])]


def table_of(won: dict[str, list[int]]) -> Table:
    """Return the table of the held-out games, by version."""
    games = list(won.values())
    table = Table("held-out games", "won", "95 % interval", "gain on the row above", title=f"{len(games[0])} openings")
    for before, (name, after) in zip([None, *games], won.items(), strict=False):
        gain = "" if before is None else "{} ({})".format(*cells(stats.gain(before, after), "+"))
        table.add_row(name, *cells(stats.share(after)), gain)
    return table


def settings_of(data: Path, seed: int, teacher: str) -> Settings:
    """Return settings of a stack whose policy `teacher` is the scripted server."""
    upstreams = {"scripted": {"url": teacher, "models": {"teacher": "scripted"}}}
    return load(environment={}, data=data, seed=seed, proxy__port=0, upstreams=upstreams)


def main() -> int:
    parser = parser_of(
        "Whether imitation warms a policy up, and GRPO goes on from there.",
        {
            "--taught": {"type": int, "default": 512, "help": "games that the teacher plays"},
            "--warm": {"type": int, "default": 8, "help": "supervised steps on the games it won"},
            "--limit": {"type": int, "default": 256, "help": "games that one of them imitates"},
            "--steps": {"type": int, "default": 8, "help": "policy-gradient steps afterwards"},
            "--games": {"type": int, "default": 600, "help": "held-out games for each of the three versions"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the openings"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
        },
    )
    args, began = parser.parse_args(), time.monotonic()
    with opened("warm", args.data, width=None) as (data, console), Teacher(next_move) as teacher:
        settings = settings_of(data, args.seed, teacher.url)
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            policy, won = LearningPolicy(stack, AGENT, _figures, console), dict[str, list[int]]()

            def play(model: str, games: int, split: str) -> dict[str, Any]:
                return policy.run("--model", model, "--games", str(games), "--split", split)

            def measure() -> None:
                won[policy.live] = play(policy.live, args.games, "eval")["won"]

            measure()
            play("teacher", args.taught, "train")
            for _ in range(args.warm):
                policy.imitate("teacher", min_reward=1.0, limit=args.limit)
            measure()
            policy.learn(args.steps, "--games", "0")
            measure()
            steps = policy.steps
    console.print(table_of(won))
    console.print(f"{policy.failed_requests} failed requests, {time.monotonic() - began:.0f} s")
    base, warmed, last = won.values()
    warmed_up, went_on = stats.gain(base, warmed), stats.gain(warmed, last)
    holds = warmed_up.low > 0 and went_on.high > 0 and one_line(steps) and not policy.failed_requests
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
