"""Notice when the machine's clock jumps: compare it with a clock that never does."""

import time


class ClockJump:
    """How far the clock has moved since the start, other than by time that passed."""

    def __init__(self) -> None:
        self._offset_s = time.time() - _steady_s()

    def seconds(self) -> float:
        """Return the jump: positive, if the clock is now ahead of where it would be without it."""
        return time.time() - _steady_s() - self._offset_s


def _steady_s() -> float:
    """Return the time since the machine was started; on Linux it goes on while a virtual machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
