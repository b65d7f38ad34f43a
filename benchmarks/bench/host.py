"""Measure CPU time that the machine's host took from its virtual cores: Linux's `steal`."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

STAT = Path("/proc/stat")
NOTEWORTHY = 0.02
"""Share of the cores' time. Less is only a timer's tick now and then."""
_STOLEN = 7
"""Index of `steal` in the numbers of a core (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal."""
_Result = TypeVar("_Result")


class Host:
    """The stolen time of each measurement."""

    def __init__(self, tries: int = 1) -> None:
        """`tries`: most repetitions of a round, to get one in which the host leaves the cores alone."""
        self._tries = tries
        self._ticks: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._again = 0

    async def calmest(self, what: str, measure: Callable[[], Awaitable[_Result]]) -> _Result:
        """Measure one round; repeat it while the host takes a notable share.

        The try with the smallest share counts, with any result.
        """
        tries: list[tuple[float, int, int, _Result]] = []
        while not tries or (tries[-1][0] >= NOTEWORTHY and len(tries) < self._tries):
            before = ticks()
            result = await measure()
            taken, in_all = (after - then for after, then in zip(ticks(), before, strict=True))
            tries.append((taken / max(1, in_all), taken, in_all, result))
        self._again += len(tries) - 1
        _, taken, in_all, result = min(tries, key=lambda one: one[0])
        so_far = self._ticks[what]
        self._ticks[what] = so_far[0] + taken, so_far[1] + in_all
        return result

    def shares(self) -> Mapping[str, float]:
        """Return the stolen share of all cores' time, by measurement."""
        return {what: taken / max(1, in_all) for what, (taken, in_all) in self._ticks.items()}

    def notes(self) -> list[str]:
        """Return notes for readers of the figures; none if the machine had its cores to itself."""
        again = f"{self._again} times the machine's host took a share of the cores, and it was measured again"
        by_what = ", ".join(f"{what} {share:.0%}" for what, share in self.shares().items() if share >= NOTEWORTHY)
        taken = f"the machine's host took of the cores' time: {by_what}; delays, and ratios in part, are its doing too"
        return [note for note, holds in ((again, self._again), (taken, by_what)) if holds]


def ticks() -> tuple[int, int]:
    """Return the stolen time since the machine's start, and the time of all cores, in ticks of the kernel's clock."""
    # Guests' times follow; the first two numbers include them already.
    numbers = [int(number) for number in STAT.read_text().partition("\n")[0].split()[1 : _STOLEN + 2]]
    return numbers[_STOLEN], sum(numbers)
