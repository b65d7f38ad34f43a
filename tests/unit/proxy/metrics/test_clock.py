"""A clock that jumps is noticed; time that passes is not a jump."""

import time

import pytest

from proxy.metrics.clock import ClockJump


def test_time_that_passes_is_no_jump() -> None:
    clock = ClockJump()
    time.sleep(0.05)
    assert abs(clock.seconds()) < 0.02


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_jump_is_measured_and_over_when_the_clock_is_right_again(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = ClockJump(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    assert clock.seconds() == pytest.approx(jump_s, abs=5)
    monkeypatch.undo()
    assert clock.seconds() == pytest.approx(0, abs=5)
