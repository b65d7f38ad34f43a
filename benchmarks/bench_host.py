"""What the machine's host took for itself: time in which a virtual core had work and did not run. Linux's `steal`."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

STAT = Path("/proc/stat")
NOTEWORTHY = 0.02
"""Of the cores' time. Less is a timer's tick here and there."""
_STOLEN = 7
"""Its place among the numbers of a core (proc_stat(5)): user, nice, system, idle, iowait, irq, softirq, steal."""


class Host:
    """By measurement, what was taken while it ran."""

    def __init__(self) -> None:
        self._ticks: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Count one round of a measurement."""
        before = ticks()
        yield
        after, (taken, in_all) = ticks(), self._ticks[what]
        self._ticks[what] = taken + after[0] - before[0], in_all + after[1] - before[1]

    def shares(self) -> Mapping[str, float]:
        """Of all cores' time, by measurement."""
        return {what: taken / max(1, in_all) for what, (taken, in_all) in self._ticks.items()}

    def told(self) -> list[str]:
        """What whoever reads the figures should know; nothing of a machine that had its cores to itself."""
        most = {what: share for what, share in self.shares().items() if share >= NOTEWORTHY}
        if not most:
            return []
        by_what = ", ".join(f"{what} {share:.0%}" for what, share in most.items())
        return [f"the machine's host took of the cores' time: {by_what}; delays, and ratios in part, are its doing too"]


def ticks() -> tuple[int, int]:
    """What was taken since the machine's start, and all of its cores' time, in ticks of the kernel's clock."""
    # Behind them stand guests' times, which are counted in the first two already.
    numbers = [int(number) for number in STAT.read_text().partition("\n")[0].split()[1 : _STOLEN + 2]]
    return numbers[_STOLEN], sum(numbers)
