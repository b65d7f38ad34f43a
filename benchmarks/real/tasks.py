"""List the tasks on which `benchmarks.real` trains a real model; each is an example app with training and eval splits.

An app takes `--base-url`, `--model`, `--seed`, `--questions`, `--split` and `--shuffle`; its last line is a JSON object
with `failed_requests`, and with `--split eval` with `each`, a reward for each question.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.process import ROOT


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    app: Path
    training: tuple[str, ...]
    """Options of the app in training."""


TASKS = {
    task.name: task
    for task in (
        # Eight attempts at a ticket are a group: they have the same prompt. A thumb on each, so that groups settle.
        Task("routing", ROOT / "examples" / "tickets" / "app.py", ("--attempts", "8", "--thumbs", "1")),
        # Each ticket once, a thumb on three answers in ten: compared with a baseline.
        Task("routing-alone", ROOT / "examples" / "tickets" / "app.py", ("--attempts", "1", "--thumbs", "0.3")),
    )
}
