"""How long the parts of a step take, and that each begins with a whole lease. Knows a clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.figures import timed


class Phases:
    """Seconds by phase; each begins with a whole lease."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._renew = renew

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._renew()
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - began, 4)

    def told(self, sampled_tokens: int = 0) -> dict[str, Any]:
        """The step's time up to here, by column."""
        return timed(time.perf_counter() - self._began, self._seconds, sampled_tokens)
