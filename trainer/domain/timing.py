"""Measure the phases of a step, and renew the lease at the start of each."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.domain.figures import timed

WAIT = "wait"
"""The phase in which a step waits for those of other policies, which compute."""


class Device:
    """What steps compute on. Those of several policies, each in a thread, take turns (`trainer.policies_at_once`)."""

    def __init__(self) -> None:
        self._taken = threading.Lock()

    @contextmanager
    def alone(self, renew: Callable[[], None], every_s: float) -> Iterator[None]:
        """Have it inside the context; `renew` is called every so many seconds of the wait."""
        while not self._taken.acquire(timeout=every_s):
            renew()
        try:
            yield
        finally:
            self._taken.release()


class Phases:
    """Seconds by phase. Each phase begins with a renewed lease; a long one calls `renew` meanwhile.

    Waits for the device are a phase of their own, and part of no other.
    """

    def __init__(self, renew: Callable[[], None], device: Device | None = None, lease_s: float = 120.0) -> None:
        """`device`: shared with other steps; None: it is this step's alone."""
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._device, self._lease_s = device, lease_s
        self.renew = renew

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase that is over."""
        return self._seconds[name]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began, without waits for the device."""
        return time.perf_counter() - self._began - self.waited_s

    @property
    def waited_s(self) -> float:
        """Seconds that the step has waited for the device."""
        return self._seconds.get(WAIT, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began, waited_s = time.perf_counter(), self.waited_s
        self.renew()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - began - (self.waited_s - waited_s))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Have the device inside the context; steps of other policies wait meanwhile."""
        if self._device is None:
            yield
            return
        began = time.perf_counter()
        with self._device.alone(self.renew, self._lease_s / 3):
            self._add(WAIT, time.perf_counter() - began)
            yield

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = round(self._seconds.get(name, 0.0) + seconds, 4)

    def columns(self, sampled_tokens: int = 0) -> dict[str, Any]:
        """Return the step's time so far, by column."""
        return timed(self.elapsed_s + self.waited_s, self._seconds, sampled_tokens)
