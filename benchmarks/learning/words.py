"""Check that a policy learns from comments alone: a real model, no reward anywhere.

Starts the whole stack with SmolLM2-135M-Instruct. The model as it is names no team at all in most answers, and would
learn that from any comment: first it is taught the form, by supervised steps on the answers of a program that names a
team by chance. Then examples/tickets/app.py asks and comments on wrong answers ("It should have gone to billing."), and
after each round a hindsight step is taken. Held-out tickets go to the version that knows the form, and to the last one.
Exit 0 only if the share of right teams rose by POINTS, with certainty; with --shuffle-rewards, where comments are those
of other tickets, only if it did not. Loopback only.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.fakes.teacher import Teacher
from benchmarks.kit.harness import opened
from benchmarks.kit.model import fetched
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT
from benchmarks.learning.policy import LearningPolicy, cells
from benchmarks.real.report import circumstances
from whetstone.config.settings import load
from whetstone.domain import stats
from whetstone.stack.stack import running

sys.path.insert(0, str(ROOT / "examples" / "tickets"))

import tickets

APP = ROOT / "examples" / "tickets" / "app.py"
FORM = "form"
"""The policy that the program is."""
ANSWERS = 64
"""Of the program, in each supervised step."""
POINTS = 0.15
"""Least gain that counts, as a share: the lower end of its interval."""


def _by_chance(messages: list[dict[str, Any]]) -> str:
    """Return a team: the same for the same ticket."""
    return random.Random(messages[-1]["content"]).choice([*tickets.SENTENCES])


def _figures(step: dict[str, Any]) -> str:
    if step["kind"] == "sft":
        return f"imitates {step['completions']} answers  loss {step['loss']:.3f}  {step['seconds']:.1f} s"
    return f"{step['completions']} corrected answers  divergence {step['loss']:.4f}  {step['seconds']:.1f} s"


def main() -> int:
    """Run the check; return its exit code."""
    parser = parser_of(
        "Whether a policy learns from comments alone.",
        {
            "--steps": {"type": int, "default": 12, "help": "rounds of questions, each with a step"},
            "--lessons": {"type": int, "default": 4, "help": "supervised steps before them, for the form"},
            "--round": {"type": int, "default": 128, "help": "questions in a round"},
            "--learning-rate": {"type": float, "default": 3e-4, "help": "AdamW's"},
            "--teacher": {
                "choices": ("self", "reference"),
                "default": "reference",
                "help": "moves with it, or is the base",
            },
            "--temperature": {"type": float, "default": 0.5, "help": "of the teacher"},
            "--questions": {"type": int, "default": 300, "help": "held-out tickets to each of the two versions"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the tickets"},
            "--shuffle-rewards": {"action": "store_true", "help": "the control: comments about other tickets"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--json": {"type": Path, "help": "a file for all figures"},
        },
    )
    args = parser.parse_args()
    began = time.monotonic()
    with opened("words", args.data, width=None) as (data, console), Teacher(_by_chance) as program:
        settings = load(
            environment={},
            upstreams={"program": {"url": program.url, "models": {FORM: "program"}}},
            data=data,
            model=fetched(console),
            seed=args.seed,
            proxy__port=0,
            trainer__learning_rate=args.learning_rate,
            trainer__hindsight_teacher=args.teacher,
            trainer__hindsight_temperature=args.temperature,
        )
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            policy = LearningPolicy(stack, APP, _figures, console, ["--thumbs", "0"])
            if args.lessons:
                # Other tickets than those of the rounds.
                policy.run("--model", FORM, "--questions", str(ANSWERS), "--seed", str(-1 - args.seed))
            for _ in range(args.lessons):
                policy.imitate(FORM, None, ANSWERS)
            held_out = ["--split", "eval", "--questions", str(args.questions)]
            # At once: a version that no longer answers is unloaded after some more.
            each: list[list[int]] = [policy.run(*held_out, "--model", policy.live)["each"]]
            for number in range(args.steps):
                options = ["--shuffle-rewards"] if args.shuffle_rewards else []
                # Another seed for each round: the app begins its tickets again with each start.
                seed = str(args.seed * 1000 + number)
                policy.run("--questions", str(args.round), "--comments", "1", "--seed", seed, *options)
                policy.learn_from_words("comments", args.round)
            each.append(policy.run(*held_out, "--model", policy.live)["each"])
            steps = policy.steps
    before, after, gain = stats.share(each[0]), stats.share(each[1]), stats.gain(each[0], each[1])
    table = Table("held-out tickets", "right", "95 % interval", title=f"{args.questions} tickets, the same for both")
    table.add_row("before", *cells(before))
    table.add_row("after", *cells(after))
    table.add_row("gain", *cells(gain, "+"))
    console.print(table)
    console.print(f"{policy.failed_requests} failed requests, {time.monotonic() - began:.0f} s")
    if args.json:
        figures = {
            **circumstances(),
            "options": {name: value for name, value in vars(args).items() if name not in ("data", "json")},
            "before": [before.mean, before.low, before.high],
            "after": [after.mean, after.low, after.high],
            "gain": [gain.mean, gain.low, gain.high],
            "steps": steps,
            "seconds": round(time.monotonic() - began, 1),
            "failed_requests": policy.failed_requests,
        }
        args.json.write_text(json.dumps(figures, indent=1, default=str) + "\n")
    as_due = gain.low <= 0 if args.shuffle_rewards else gain.low >= POINTS
    return 0 if as_due and not policy.failed_requests else 1


if __name__ == "__main__":
    sys.exit(main())
