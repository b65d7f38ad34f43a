"""When a launched job ends."""

import threading
import time

from trainer.job import take_steps


def test_a_job_ends_once_it_has_been_idle() -> None:
    due = [True, True, False, True]
    calls = 0

    def sweep() -> bool:
        nonlocal calls
        calls += 1
        return due.pop(0) if due else False

    began = time.monotonic()
    take_steps(sweep, idle_s=0.2, sweep_s=0.01, stopped=threading.Event())
    assert not due and calls > 5
    assert time.monotonic() - began >= 0.2


def test_a_job_that_is_stopped_takes_no_further_step() -> None:
    stopped, calls = threading.Event(), 0

    def sweep() -> bool:
        nonlocal calls
        calls += 1
        if calls == 3:
            stopped.set()
        return True

    take_steps(sweep, idle_s=60, sweep_s=60, stopped=stopped)
    assert calls == 3


def test_a_stop_ends_the_wait_between_sweeps() -> None:
    stopped = threading.Event()
    threading.Timer(0.1, stopped.set).start()
    began = time.monotonic()
    take_steps(lambda: False, idle_s=60, sweep_s=60, stopped=stopped)
    assert time.monotonic() - began < 30
