"""Let a model learn the tasks of `benchmarks.real`, and measure the share of a card's peak that a step uses."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.process import ROOT

PEAK_TFLOPS = {
    "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10": 125, "A30": 165, "4090": 165, "3090": 71,
}  # fmt: skip
"""Part of a card's name -> its dense bf16 TFLOPS, of NVIDIA's data sheets (float32 accumulation; SXM where there are
several)."""


def peak_of(card: str) -> float | None:
    """Return a card's peak by its name; None of one that is not listed."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in card.replace("-", " ").split()), None)


def share_of_peak(
    folder: Path, card: str | None, options: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run `benchmarks.learning.mfu`; return a row for each shape, and a fault if it fails."""
    path = folder / "mfu.json"
    peak = peak_of(card) if card else None
    command = [sys.executable, "-m", "benchmarks.learning.mfu", "--json", str(path), *options]
    command += [] if peak is None else ["--peak-tflops", str(peak)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return [], [f"the share of peak was not measured: {done.stderr.strip().splitlines()[-1:]}"]
    return json.loads(path.read_text(encoding="utf-8")), []


def learned(
    task: str, model: str, folder: Path, data: Path, options: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Run a task; its own report lies in `folder` afterwards. Return the most important figures, and what fails."""
    path = folder / f"{task}.json"
    command = [sys.executable, "-m", "benchmarks.real", "--task", task, "--model", model]
    command += ["--json", str(path), "--data", str(data), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    faults = [line.removeprefix("FAULT ") for line in done.stdout.splitlines() if line.startswith("FAULT ")]
    if not path.exists():
        return {"output": done.stdout}, [f"{task}: ended with exit code {done.returncode}"]
    figures = json.loads(path.read_text(encoding="utf-8"))
    return summary(figures), [f"{task}: {fault}" for fault in faults]


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


def _gain(measured: dict[str, Any]) -> dict[str, Any]:
    if "gain" not in measured:
        return {}
    mean, low, high = measured["gain"]
    return {"gain": mean, "from": low, "to": high}
