"""Measure the phases of a step, and renew the lease at the start of each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.domain.figures import timed


class Phases:
    """Seconds by phase. Each phase begins with a renewed lease; a long one calls `renew` meanwhile."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.renew = renew

    def seconds(self, name: str) -> float:
        """Return the seconds of a phase that is over."""
        return self._seconds[name]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self.renew()
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - began, 4)

    def columns(self, sampled_tokens: int = 0) -> dict[str, Any]:
        """Return the step's time so far, by column."""
        return timed(self.elapsed_s, self._seconds, sampled_tokens)
