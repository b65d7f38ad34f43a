"""Measure the share of a card's peak arithmetic that a step uses, by `benchmarks.learning.mfu`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.process import ROOT
from whetstone.memory.devices import Card

PEAK_TFLOPS = {
    "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "A10": 125, "A30": 165, "4090": 165, "3090": 71,
}  # fmt: skip
"""Part of a card's name -> its dense bf16 TFLOPS, of NVIDIA's data sheets (float32 accumulation; SXM where there are
several)."""
LARGE_BYTES = 40 * 2**30
"""From so much memory on, a shape of 7B is measured as well."""
REHEARSED = ("--device", "cpu", "--groups", "1", "--prompt", "64", "--answer", "32")


def peak_of(name: str) -> float | None:
    """Return the peak of a card with this name; None of one that is not listed."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name.replace("-", " ").split()), None)


def share_of_peak(folder: Path, card: Card | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each shape that fits the card, and what fails. Without a card: a tiny shape on the CPU."""
    if card is None:
        return _measure(folder, "tiny", REHEARSED)
    peak = peak_of(card.name)
    options = () if peak is None else ("--peak-tflops", str(peak))
    rows, faults = list[dict[str, Any]](), list[str]()
    for shape in ("0.5B", *(("7B",) if card.memory_bytes >= LARGE_BYTES else ())):
        measured, failed = _measure(folder, shape, options)
        rows, faults = rows + measured, faults + failed
    return rows, faults


def _measure(folder: Path, shape: str, options: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    path = folder / f"peak-{shape}.json"
    command = [sys.executable, "-m", "benchmarks.learning.mfu", "--shapes", shape, "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [], [f"share of peak, {shape}: exit code {done.returncode}: {last}"]
    return json.loads(path.read_text(encoding="utf-8")), []
