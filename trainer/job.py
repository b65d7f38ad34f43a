"""A training worker for a machine that exists only while there are steps (`python -m trainer.job`).

It takes every step that is due, and ends once there has been none for `launcher.idle_s`. It needs the database, vLLM
and the adapters; no broker.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from whetstone.config.launcher import LauncherSettings
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.observability import log_setup, tracing
from whetstone.stack.stack import several_processes

if TYPE_CHECKING:
    from trainer.worker import Worker

log = logging.getLogger("trainer.job")
ARGUMENT = "job"
"""Makes the first process of `trainer.team` a job."""


def main() -> None:
    """Run until steps are no longer due, or until SIGTERM or SIGINT: then the step in progress ends first."""
    try:
        settings = load()
    except SettingsError as error:
        raise SystemExit(str(error)) from error
    if settings.trainer.processes > 1:
        command = [*several_processes(settings.trainer), ARGUMENT]
        os.execv(command[0], command)
    if settings.trainer.backend == "unsloth":
        # It patches transformers, so it is imported before everything else.
        import unsloth  # noqa: F401
    from trainer.worker import Worker

    run(settings, Worker(settings))


def run(settings: Settings, worker: "Worker") -> None:
    """Let the worker sweep until it is idle or stopped.

    Raises:
        SystemExit: something that steps need is missing.
    """
    log_setup.set_up(settings.log)
    tracing.start(settings.log, "trainer")
    worker.prepare()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    default: float = LauncherSettings.model_fields["idle_s"].default
    idle_s = default if settings.launcher is None else settings.launcher.idle_s
    log.info("the job takes steps until none has been due for %g s", idle_s)
    take_steps(worker.sweep, idle_s, settings.sweep_s, stopped)
    log.info("the job ends: %s", "it was stopped" if stopped.is_set() else f"no step has been due for {idle_s:g} s")


def take_steps(sweep: Callable[[], bool], idle_s: float, sweep_s: float, stopped: threading.Event) -> None:
    """Call `sweep` every `sweep_s` seconds until it has taken no step for `idle_s` seconds, or `stopped` is set."""
    took_at = time.monotonic()
    while not stopped.is_set() and time.monotonic() - took_at < idle_s:
        if sweep():
            took_at = time.monotonic()
        else:
            stopped.wait(sweep_s)


if __name__ == "__main__":
    main()
