"""The judges of this process: how many groups each may rank at once, and which are paused."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from judge.ruler import plan
from whetstone.config.rewards import JudgeSettings


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a judge."""

    until: datetime
    why: str
    failures: int
    """Number of failures in a row."""


@dataclass(slots=True)
class Judges:
    """The configured judges, how many groups each may rank at once, and which are paused."""

    settings: Mapping[str, JudgeSettings]
    paused: dict[str, Pause]
    """By judge; shared with later passes."""
    free: dict[str, asyncio.Semaphore] = field(init=False)
    rng: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        """Create a semaphore for each judge."""
        self.free = {name: asyncio.Semaphore(judge.concurrency) for name, judge in self.settings.items()}

    def pause(self, name: str, now: datetime, why: str, after_s: float | None) -> float:
        """Pause a judge that did not answer, for at least `after_s` seconds; return the length of the pause in seconds.

        Calls that were in flight together count as one failure: while a pause runs, another failure only extends it, to
        `after_s` from now.
        """
        before = self.paused.get(name)
        if before is not None and before.until > now:
            until = now + timedelta(seconds=after_s or 0.0)
            if until > before.until:
                self.paused[name] = Pause(until, why, before.failures)
            return (max(until, before.until) - now).total_seconds()
        failures = 1 + (before.failures if before is not None else 0)
        wait_s = max(after_s or 0.0, plan.wait_s(failures, self.rng))
        self.paused[name] = Pause(now + timedelta(seconds=wait_s), why, failures)
        return wait_s

    def answers(self, name: str, now: datetime) -> None:
        """Record that the judge answers. A running pause stays: the call may have begun before the pause."""
        before = self.paused.get(name)
        if before is not None and before.until <= now:
            del self.paused[name]
