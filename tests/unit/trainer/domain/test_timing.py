"""Phases of steps that share a device."""

import threading
import time

from trainer.domain.timing import WAIT, Device, Phases


def test_a_step_alone_waits_for_nobody() -> None:
    phases = Phases(lambda: None)
    with phases.computing(), phases.phase("train"):
        pass
    assert set(phases.columns()["phases"]) == {"train"}


def test_a_step_waits_for_another_ones_computing_and_keeps_its_lease() -> None:
    device, renewed = Device(), threading.Event()
    phases, lease_s = Phases(renewed.set, device, lease_s=0.03), 0.03
    other = Phases(lambda: None, device, lease_s)
    began, inside = threading.Event(), []

    def step() -> None:
        with phases.phase("probe"):
            began.set()
            with phases.computing():
                inside.append(True)

    with other.computing():
        thread = threading.Thread(target=step)
        thread.start()
        began.wait()
        renewed.clear()  # of the phase's beginning
        assert renewed.wait(10) and not inside
        time.sleep(0.05)
    thread.join(10)
    assert inside
    seconds = phases.columns()["phases"]
    assert seconds[WAIT] >= 0.05 > seconds["probe"]


def test_a_renewal_that_fails_ends_the_wait_and_the_device_is_free_again() -> None:
    device = Device()

    def lost() -> None:
        raise KeyError("the lease")

    with device.alone(lost, 1):
        thread_failed = threading.Event()

        def step() -> None:
            try:
                with device.alone(lost, 0.01):
                    pass
            except KeyError:
                thread_failed.set()

        thread = threading.Thread(target=step)
        thread.start()
        thread.join(10)
        assert thread_failed.is_set()
    with device.alone(lost, 1):
        pass
