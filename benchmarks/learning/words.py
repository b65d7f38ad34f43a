"""Check that a policy learns from comments alone: a real model, no reward anywhere.

Starts the whole stack with SmolLM2-135M-Instruct. As it is, this model names no team in most answers, and does not name
the team that a correction in its prompt names. Larger models do both; it is taught both first, by supervised steps on
the answers of a program: to a ticket with a note, the noted team, which is one by chance; to one without, a team by
chance. They tell nothing of what a team does. That version is the teacher from then on.
Then examples/tickets/app.py asks and comments on each answer ("It should have gone to billing.", "Yes, billing is
right."), and after each round a hindsight step is taken. Held-out tickets, without notes, go to the version before the
rounds, and to the last.
Exit 0 only if the share of right teams rose by POINTS, with certainty; with --shuffle-rewards, where comments are those
of other tickets, only if it did not.
`--signals thumbs`: numbers alone, a thumb on each answer, and a policy-gradient step after each round; `--signals
comments thumbs`: both, and two steps. `--beside FILE`: exit 0 only if the policy ends at least as good as that run's.
Loopback only.
"""

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.table import Table

from benchmarks.fakes.teacher import Teacher
from benchmarks.kit.harness import opened
from benchmarks.kit.model import fetched
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT
from benchmarks.learning.policy import LearningPolicy, cells
from benchmarks.real.report import circumstances, options_of, steps_of, write
from trainer.domain.examples.corrections import TEMPLATE, with_correction
from whetstone.config.settings import load
from whetstone.domain import stats
from whetstone.stack.stack import Stack, running

sys.path.insert(0, str(ROOT / "examples" / "tickets"))

import tickets

APP = ROOT / "examples" / "tickets" / "app.py"
TEAMS = [*tickets.SENTENCES]
FORM = "form"
"""The policy that the program is."""
ANSWERS = 64
"""Of the program to tickets without a note, and as many to tickets with one, in each supervised step."""
POINTS = 0.15
"""Least gain that counts, as a share: the lower end of its interval."""
SETTINGS = {
    "proxy__port": 0,
    "groups__prompt_window_s": 0,  # each ticket stands alone
    "trainer__sft_rows_per_update": 16,
    "trainer__updates_per_step": 2,
}


def _named(messages: list[dict[str, Any]]) -> str:
    """Return the team that the ticket's note names; without a note one by chance, the same for the same ticket."""
    ticket = messages[-1]["content"]
    noted = (team for team in TEAMS if any(tickets.comment(team, is_right=right) in ticket for right in (True, False)))
    return next(noted, random.Random(ticket).choice(TEAMS))


def _ask_with_notes(stack: Stack, seed: int) -> None:
    """Ask the program ANSWERS tickets with a note that names a team by chance, worded as a hindsight step does."""
    rng = random.Random(seed)
    with OpenAI(base_url=f"{stack.proxy_url}/v1", api_key="none", max_retries=0) as client:
        for number in range(ANSWERS):
            text, _ = tickets.ticket("train", seed, number)
            note = tickets.comment(rng.choice(TEAMS), is_right=rng.random() < 0.5)
            messages = with_correction(tickets.messages(text), note, TEMPLATE)
            client.chat.completions.create(model=FORM, messages=messages, max_tokens=4)


def _figures(step: dict[str, Any]) -> str:
    if step["kind"] == "sft":
        return f"imitates {step['completions']} answers  loss {step['loss']:.3f}  {step['seconds']:.1f} s"
    if step["kind"] == "hindsight":
        return f"{step['completions']} corrected answers  divergence {step['loss']:.4f}  {step['seconds']:.1f} s"
    return f"{step['trajectories']} answers  thumbs up {step['reward_mean']:.3f}  {step['seconds']:.1f} s"


def _learn(policy: LearningPolicy, signals: Sequence[str], questions: int, options: Sequence[str]) -> None:
    """Ask a round of tickets, and take a step on what the app says of the answers, for each of the signals."""
    shares = {"--comments": "comments", "--thumbs": "thumbs"}
    posted = [text for name, signal in shares.items() for text in (name, str(int(signal in signals)))]
    policy.run("--questions", str(questions), *posted, *options)
    if "thumbs" in signals:
        policy.learn_from_rewards()
    if "comments" in signals:
        policy.learn_from_words("comments", questions)


def main() -> int:
    """Run the check; return its exit code."""
    parser = parser_of(
        "Whether a policy learns from comments alone.",
        {
            "--signals": {
                "nargs": "+",
                "choices": ("comments", "thumbs"),
                "default": ["comments"],
                "help": "what the app posts",
            },
            "--steps": {"type": int, "default": 12, "help": "rounds of questions, with a step for each signal"},
            "--lessons": {"type": int, "default": 3, "help": "supervised steps before them"},
            "--round": {"type": int, "default": 64, "help": "questions in a round"},
            "--learning-rate": {"type": float, "default": 3e-4, "help": "AdamW's"},
            "--temperature": {"type": float, "default": 0.5, "help": "of the teacher"},
            "--questions": {"type": int, "default": 300, "help": "held-out tickets to each of the two versions"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the tickets"},
            "--shuffle-rewards": {"action": "store_true", "help": "the control: what was posted about other tickets"},
            "--beside": {"type": Path, "help": "another run's --json, with as many held-out tickets"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--json": {"type": Path, "help": "a file for all figures"},
        },
    )
    args = parser.parse_args()
    beside = json.loads(args.beside.read_bytes())["each"][1] if args.beside else None
    began = time.monotonic()
    with opened("words", args.data, width=None) as (data, console), Teacher(_named) as program:
        settings = load(
            environment={},
            upstreams={"program": {"url": program.url, "models": {FORM: "program"}}},
            data=data,
            model=fetched(console),
            seed=args.seed,
            trainer__learning_rate=args.learning_rate,
            trainer__reference_version=args.lessons,
            trainer__hindsight_temperature=args.temperature,
            **SETTINGS,
        )
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
            policy = LearningPolicy(stack, APP, _figures, console)
            if args.lessons:
                # Other tickets than those of the rounds.
                seed = -1 - args.seed
                policy.run("--model", FORM, "--questions", str(ANSWERS), "--thumbs", "0", "--seed", str(seed))
                _ask_with_notes(stack, seed - 1000)
            for _ in range(args.lessons):
                policy.imitate(FORM, None, 2 * ANSWERS)
            held_out = ["--split", "eval", "--questions", str(args.questions)]
            # At once: a version that no longer answers is unloaded after some more.
            each: list[list[int]] = [policy.run(*held_out, "--model", policy.live)["each"]]
            control = ["--shuffle-rewards"] if args.shuffle_rewards else []
            for number in range(args.steps):
                # Another seed for each round: the app begins its tickets again with each start.
                _learn(policy, args.signals, args.round, ["--seed", str(args.seed * 1000 + number), *control])
            each.append(policy.run(*held_out, "--model", policy.live)["each"])
            steps = policy.steps
    before, after, gain = stats.share(each[0]), stats.share(each[1]), stats.gain(each[0], each[1])
    table = Table("held-out tickets", "right", "95 % interval", title=f"{args.questions} tickets, the same for both")
    table.add_row("before", *cells(before))
    table.add_row("after", *cells(after))
    table.add_row("gain", *cells(gain, "+"))
    difference = stats.gain(beside, each[1]) if beside else None
    if difference:
        table.add_row("over the run beside", *cells(difference, "+"))
    console.print(table)
    console.print(f"{policy.failed_requests} failed requests, {time.monotonic() - began:.0f} s")
    if args.json:
        figures = {
            **circumstances(),
            "options": options_of(args),
            "before": [before.mean, before.low, before.high],
            "after": [after.mean, after.low, after.high],
            "gain": [gain.mean, gain.low, gain.high],
            "over_the_run_beside": difference and [difference.mean, difference.low, difference.high],
            "each": each,
            "steps": steps_of(steps),
            "seconds": round(time.monotonic() - began, 1),
            "failed_requests": policy.failed_requests,
        }
        write(args.json, figures)
    as_due = gain.low <= 0 if args.shuffle_rewards else gain.low >= POINTS
    if difference:
        as_due = difference.mean >= 0
    return 0 if as_due and not policy.failed_requests else 1


if __name__ == "__main__":
    sys.exit(main())
