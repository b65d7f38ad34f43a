"""Let a model learn the tasks of `benchmarks.real`, and summarise what came of it."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.process import ROOT
from benchmarks.real.report import faults_of

HOLDS, DOES_NOT_HOLD = 0, 1
"""Exit codes of a run that has ended."""
NEARLY_ALL = 0.9
"""A model that answers so many of the held-out questions before any reward need not get better."""


def learn(task: str, model: str, folder: Path, data: Path, options: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Run a task; its own report lies in `folder` afterwards. Return the most important figures, and what fails."""
    path = (folder / f"{task}.json").resolve()
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.real", "--task", task, "--model", model]
    command += ["--json", str(path), "--data", str(data), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (HOLDS, DOES_NOT_HOLD) or not path.exists():
        output = (done.stdout + done.stderr).strip()
        return {"output": output}, [f"{task}: ended with exit code {done.returncode}"]
    figures = json.loads(path.read_text(encoding="utf-8"))
    return summary(figures), [f"{task}: {fault}" for fault in _faults(figures)]


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Return a task's measured shares, its minutes, and the median seconds of a step by phase."""
    steps = [step for step in figures["steps"] if step["kind"] == "grpo"]
    phases = {name for step in steps for name in step.get("phases", {})}
    medians = {name: statistics.median(step.get("phases", {}).get(name, 0.0) for step in steps) for name in phases}
    measured = [
        {"measured": stage, "share": entry["share"][0], **_gain(entry)} for stage, entry in figures["measured"].items()
    ]
    return {
        "held out": measured,
        "seconds": dict(figures["seconds"]),
        "median step, seconds by phase": dict(sorted(medians.items(), key=lambda phase: -phase[1])),
    }


def _faults(figures: dict[str, Any]) -> list[str]:
    share, *_ = figures["measured"]["before"]["share"]
    return [fault for fault in faults_of(figures) if not ("did not rise" in fault and share >= NEARLY_ALL)]


def _gain(measured: dict[str, Any]) -> dict[str, Any]:
    if "gain" not in measured:
        return {}
    mean, low, high = measured["gain"]
    return {"gain": mean, "from": low, "to": high}
