"""Run an example app as a separate process that gets only the base_url, and read its final report."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from whetstone.errors import WhetstoneError
from whetstone.stack.stack import Stack


class AppFailed(WhetstoneError):
    """The app ended without a report; the message gives its exit code."""


@contextmanager
def app(
    stack: Stack, script: Path, arguments: Sequence[str], niceness: int = 0, python: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `script` against the stack's proxy; kill it at the end if it still runs.

    Its niceness is how far it yields the CPU to others. `python`: what runs it; None: this interpreter.
    """
    with subprocess.Popen(
        [str(python or sys.executable), str(script), "--base-url", f"{stack.proxy_url}/v1", *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(niceness),  # noqa: PLW1509  it takes no lock that another thread could hold
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def still_runs(process: subprocess.Popen[bytes]) -> None:
    """Check that an app that should still run does.

    Raises:
        AppFailed: it has ended.
    """
    if process.poll() is not None:
        raise AppFailed(f"{_name(process)} ended early, with code {process.returncode}")


def report_of(process: subprocess.Popen[bytes], stack: Stack) -> dict[str, Any]:
    """Wait for the app to end while the stack runs; return the JSON object in its last line.

    Raises:
        AppFailed: its exit code is not 0, or it printed nothing.
        StartFailed: a program of the stack ended.
    """
    while True:
        stack.watch()
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=0.5)
            break
    if process.returncode or not output.strip():
        raise AppFailed(f"{_name(process)} ended with code {process.returncode}")
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


def _name(process: subprocess.Popen[bytes]) -> str:
    arguments = process.args if isinstance(process.args, list) else [str(process.args)]
    return Path(str(arguments[min(1, len(arguments) - 1)])).name
