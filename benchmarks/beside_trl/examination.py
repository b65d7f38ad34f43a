"""Ask adapters of either side the held-out tickets: the same app, the same vLLM, nothing of ours between them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.beside_trl.run import Point
from benchmarks.kit.process import running_vllms
from benchmarks.real.tasks import TASKS
from whetstone.config.settings import load
from whetstone.errors import WhetstoneError
from whetstone.vllm import client

CONNECTIONS = 32
ADAPTER = "examined"


class QuestionsFailed(WhetstoneError):
    """Requests of the app failed: their answers are neither right nor wrong."""


def examine(model: str, rank: int, folder: Path, adapters: Sequence[str], questions: int) -> list[list[int]]:
    """Return for the base model and for each adapter of at most this rank 1 or 0 for each held-out ticket.

    Raises:
        StartFailed: vLLM does not start.
        VllmError: it refuses an adapter.
        CalledProcessError, QuestionsFailed: the app, or a request, failed.
    """
    settings = load(environment={}, data=folder, model=model, trainer__lora_rank=rank)
    with running_vllms(folder, {"vllm": settings}) as (url,), closing(client.Vllm(url)) as control:
        answers = [_ask(url, settings.served_name, questions)]
        for number, adapter in enumerate(adapters):
            name = f"{ADAPTER}-{number}"
            control.load(name, Path(adapter))
            answers.append(_ask(url, name, questions))
            control.unload(name)
        return answers


def last_of_each(points: Sequence[Point], every_s: float) -> list[Point]:
    """Return the last point of each `every_s` seconds: what is examined."""
    by_time = {int(point.seconds // every_s): point for point in points}
    return list(by_time.values())


def _ask(url: str, name: str, questions: int) -> list[int]:
    command = [sys.executable, str(TASKS["routing-groups"].app), "--base-url", f"{url}/v1", "--model", name]
    command += ["--split", "eval", "--questions", str(questions), "--connections", str(CONNECTIONS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    if report["failed_requests"]:
        raise QuestionsFailed(f"{report['failed_requests']} of {questions} requests to {name} failed")
    each: list[int] = report["each"]
    return each
