"""The judges of this process: how many groups each may look at, and which are left alone for now. Knows no group."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from judge.ruler import panel
from whetstone.worth import JudgeSettings


@dataclass(frozen=True, slots=True)
class Pause:
    """A judge is left alone."""

    until: datetime
    why: str
    failures: int
    """So many times in a row it was asked again and did not answer."""


@dataclass(slots=True)
class Judges:
    """The judges there are, how many groups each may look at, and which are left alone for now."""

    settings: Mapping[str, JudgeSettings]
    paused: dict[str, Pause]
    """By judge; those of a later pass know it too."""
    free: dict[str, asyncio.Semaphore] = field(init=False)
    rng: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        """A semaphore for each."""
        self.free = {name: asyncio.Semaphore(judge.concurrency) for name, judge in self.settings.items()}

    def pause(self, name: str, now: datetime, why: str, after_s: float | None) -> float:
        """Leave a judge alone that did not answer, for `after_s` seconds at least; return for how many.

        Calls that were under way together are one failure: while a pause runs, another one only makes it longer, to
        `after_s` from now.
        """
        before = self.paused.get(name)
        if before is not None and before.until > now:
            until = now + timedelta(seconds=after_s or 0.0)
            if until > before.until:
                self.paused[name] = Pause(until, why, before.failures)
            return (max(until, before.until) - now).total_seconds()
        failures = 1 + (before.failures if before is not None else 0)
        wait_s = max(after_s or 0.0, panel.wait_s(failures, self.rng))
        self.paused[name] = Pause(now + timedelta(seconds=wait_s), why, failures)
        return wait_s

    def answers(self, name: str, now: datetime) -> None:
        """It is up. A pause that has not passed stays: that call may have begun before it did."""
        before = self.paused.get(name)
        if before is not None and before.until <= now:
            del self.paused[name]
