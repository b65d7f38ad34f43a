"""When a launched job ends."""

import threading
import time

from trainer.job import take_steps


def test_a_job_ends_once_it_has_waited_without_a_step() -> None:
    due, waits = [True, False, True, False], 0

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal waits
            assert timeout == 1.0
            waits += 1
            return False

    take_steps(lambda: bool(due) and due.pop(0), idle_s=5, sweep_s=1.0, stopped=Stop())
    assert not due and waits == 1 + 5


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
