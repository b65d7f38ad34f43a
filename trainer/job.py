"""A training worker for a machine that exists only while there are steps (`python -m trainer.job`).

It takes every step that is due, and ends once it has waited for `launcher.idle_s` without one. It needs the database,
vLLM and the adapters; no broker.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from whetstone.config.settings import Settings, SettingsError, load
from whetstone.observability import log_setup, tracing
from whetstone.stack.stack import several_processes
from whetstone.stack.supervisor import stop_at_signals

if TYPE_CHECKING:
    from trainer.worker import Worker

log = logging.getLogger("trainer.job")
ARGUMENT = "job"
"""Makes the first process of `trainer.team` a job."""


def main() -> None:
    """Run until no step is due any more, or until SIGTERM or SIGINT: then the step in progress ends first. A second
    signal ends the process at once."""
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
    stop_at_signals(worker.stopped)
    idle_s = settings.launcher.idle_s
    log.info("the job takes steps until it has waited for %g s without one", idle_s)
    take_steps(worker.sweep, idle_s, settings.sweep_s, worker.stopped)
    log.info("the job ends: %s", "it was stopped" if worker.stopped.is_set() else f"{idle_s:g} s without a step")


def take_steps(sweep: Callable[[], bool], idle_s: float, sweep_s: float, stopped: threading.Event) -> None:
    """Call `sweep` until it has taken no step while `idle_s` seconds were waited, or `stopped` is set.

    Only the waiting between sweeps counts: a sweep may take long and take no step, as where vLLM was away.
    """
    waited_s = 0.0
    while not stopped.is_set() and waited_s < idle_s:
        if sweep():
            waited_s = 0.0
        else:
            stopped.wait(sweep_s)
            waited_s += sweep_s


if __name__ == "__main__":
    main()
