"""Make figures of a run: what does not hold, the table, the file that is committed, the picture."""

import argparse
import json
import math
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.kit.harness import present
from benchmarks.kit.process import ROOT
from benchmarks.learning.policy import cells
from benchmarks.real.progress import Measurement, Progress
from benchmarks.real.task import Task
from benchmarks.real.training import AFTER, BEFORE, LESSONS_ALONE, Training
from whetstone.demo import curve
from whetstone.domain import stats
from whetstone.domain.why_not_trained import WhyNotTrained as Why
from whetstone.registry.projects import TRAINED

RESULTS = ROOT / "docs" / "results"
MAX_KL = 1.0
"""Nats a token: the largest mean k3 from the base model to the policy in any step, of a real model without lessons."""
MIN_PREFERRED = 0.55
"""Lower end of the share of held-out inputs on which the judge prefers the last version's answer; a tie counts half."""
MIN_TRAINABLE = 0.95
MOST_REJECTED = 0.05
"""Of the steps. A gate that rejects none of many candidates would be no gate; one that rejects more finds a fault."""
TRAINABLE = frozenset(
    (
        *(TRAINED, Why.NO_REWARD, Why.GROUP_OPEN, Why.WAITING_STEP, Why.POLICY_NOT_TRAINING, Why.NO_GROUP),
        *(Why.GROUP_UNIFORM, Why.JUDGE_NOISE),
    )
)
"""Fates of attempts that nothing was wrong with: trained on, waiting, or of a group whose rewards are all equal, or to
its judge as good as equal."""
STEP = (
    "number", "kind", "state", "version_in", "version_out", "trajectories", "baselined", "completions",
    "sampled_tokens", "read_tokens", "reward_mean", "loss", "kl", "entropy", "mismatch_k3", "grad_norm",
    "learning_rate", "seconds", "phases", "error",
)  # fmt: skip
"""Columns of a step in the file."""


def figures_of(training: Training, progress: Progress, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run as JSON holds them. `settings`: chosen ones, by the run or automatically."""
    plan, task = progress.plan, training.task
    return {
        "task": plan.task,
        "seed": plan.seed,
        "shuffle_rewards": plan.shuffle_rewards,
        **circumstances(),
        "model": Path(plan.model).name,
        "settings": settings,
        "planned": {"steps": plan.steps, "lessons": plan.lessons, "questions": plan.questions}
        | ({} if math.isinf(task.minutes) else {"minutes": task.minutes}),
        "seconds": {stage: round(seconds, 1) for stage, seconds in progress.seconds.items()},
        "failed_requests": progress.failed_requests,
        "fates": training.policy.fates,
        "max_kl": None if task.lessons or task.model else MAX_KL,
        "measured": {stage: _measured(measured, progress) for stage, measured in progress.measured.items()},
        **_preferred(progress),
        "curve": [
            {"version": version, "reward": round(mean, 4), "attempts": attempts}
            for version, mean, attempts in training.curve()
        ],
        "steps": steps_of(training.policy.ended),
    }


def steps_of(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of the steps that a file has."""
    return [{name: _rounded(step[name]) for name in STEP if step[name] is not None} for step in steps]


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return a run's options but for the paths of its results."""
    chosen = {name: value for name, value in vars(args).items() if name not in ("data", "json")}
    return {name: value.name if isinstance(value, Path) else value for name, value in chosen.items()}


def circumstances() -> dict[str, Any]:
    """Return when, on which code and beside how much other work a run ended."""
    return {
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain", "-uno") else ""),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def faults_of(figures: dict[str, Any]) -> Sequence[str]:
    """Return what does not hold."""
    steps, measured, shuffled = figures["steps"], figures["measured"], figures["shuffle_rewards"]
    learned = [step for step in steps if step["kind"] == "grpo"]
    ended = [step["state"] for step in steps if step["state"] not in ("promoted", "rejected")]
    rejected = sum(step["state"] == "rejected" for step in steps)
    worst_kl = max((step["kl"] for step in learned if "kl" in step), default=0.0)
    gain = stats.gain(measured[BEFORE]["each"], measured[AFTER]["each"])
    planned = figures["planned"]
    in_time = figures["seconds"].get(AFTER, 0.0) < 60 * planned.get("minutes", math.inf)
    limit = figures["max_kl"]
    preferred = figures.get("preferred", {"share": [1.0, 1.0, 1.0]})["share"]
    trainable = trainable_share(figures["fates"])
    return present(
        {
            f"{figures['failed_requests']} requests failed": figures["failed_requests"],
            f"{len(learned)} steps, {planned['steps']} are due": in_time and len(learned) < planned["steps"],
            f"steps that did not end well: {', '.join(ended)}": ended,
            f"{rejected} of {len(steps)} candidates were rejected; at most {MOST_REJECTED:.0%}": rejected
            > MOST_REJECTED * len(steps),
            f"{worst_kl:.2f} nats a token from the base model; at most {limit}": limit is not None and worst_kl > limit,
            f"{trainable:.1%} of the attempts in training were trainable; at least {MIN_TRAINABLE:.0%}": trainable
            < MIN_TRAINABLE,
            f"the reward did not rise: {gain.low:+.1%} to {gain.high:+.1%}": not shuffled and gain.low <= 0,
            f"the judge prefers it in {preferred[0]:.1%} (from {preferred[1]:.1%} on)": not shuffled
            and preferred[1] <= MIN_PREFERRED,
            f"the reward rose though rewards mean nothing: from {gain.low:+.1%} on": shuffled and gain.low > 0,
        }
    )


def trainable_share(fates: dict[str, int]) -> float:
    """Return the share of training attempts that a step took, or could take; 1 without any."""
    if not fates:
        return 1.0
    return sum(count for fate, count in fates.items() if fate in TRAINABLE) / sum(fates.values())


def table_of(progress: Progress, task: Task) -> Table:
    """Return the table of what was measured."""
    fields = [task.fields] if task.fields else []
    title = f"{progress.plan.questions} questions, the same for each"
    table = Table("held-out questions", task.right, "95 % interval", *fields, "gain on the first", title=title)
    first = progress.measured[BEFORE]
    for stage, measured in progress.measured.items():
        share = [f"{sum(measured.fields) / len(measured.fields):.1%}"] if fields else []
        gain = "" if measured is first else "{} ({})".format(*cells(stats.gain(first.each, measured.each), "+"))
        table.add_row(NAMES[stage], *cells(stats.share(measured.each)), *share, gain)
    return table


NAMES = {
    BEFORE: "before rewards",
    AFTER: "after rewards",
    LESSONS_ALONE: "as many minutes of more supervised steps",
}
"""Stage -> what it is called in the table."""


def draw(path: Path, figures: dict[str, Any], task: Task) -> None:
    """Write the picture of a run: rewards in training by version, and what was measured."""
    held_out = [(NAMES[stage], stats.share(measured["each"])) for stage, measured in figures["measured"].items()]
    title = f"{figures['model']}, {task.name}, seed {figures['seed']}"
    curve.draw(
        path,
        [point["reward"] for point in figures["curve"]],
        held_out,
        title + (", rewards shuffled" if figures["shuffle_rewards"] else ""),
        attempts="attempts in training, by version",
        share=f"reward; held out: share of {task.right}",
    )


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write the file, a list or an object a line where it fits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'"{name}": {_lines(value)}' for name, value in figures.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    """Return JSON in which each object of a list has a line."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]"
    return json.dumps(value)


def _measured(measured: Measurement, progress: Progress) -> dict[str, Any]:
    share, first = stats.share(measured.each), progress.measured[BEFORE]
    entry: dict[str, Any] = {"version": measured.version, "share": _interval(share)}
    if measured is not first:
        entry["gain"] = _interval(stats.gain(first.each, measured.each))
    if measured.fields:
        entry["fields"] = round(sum(measured.fields) / len(measured.fields), 4)
    return entry | {"each": measured.each}


def _preferred(progress: Progress) -> dict[str, Any]:
    points = progress.preferred
    return (
        {"preferred": {"share": _interval(stats.paired([[point] for point in points])), "each": points}}
        if points
        else {}
    )


def _interval(interval: stats.Interval) -> list[float]:
    return [round(value, 4) for value in (interval.mean, interval.low, interval.high)]


def _rounded(value: Any) -> Any:
    """Return a figure with six digits, and each of its phases."""
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _git(*arguments: str) -> str:
    """Return what git answers; empty outside of a repository, and where there is no git."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return run.stdout.strip()
