"""Readings of a database that hangs: the page comes all the same, and only one thread waits."""

import asyncio
import gc
import threading
import time

import pytest

from proxy.metrics.patient_reader import PatientReader


def test_a_reading_in_time_is_returned() -> None:
    assert asyncio.run(PatientReader().read(lambda: [1])) == [1]


def test_an_error_of_the_reading_is_raised() -> None:
    def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(PatientReader().read(fails))


def test_an_error_that_comes_too_late_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    def fails() -> None:
        released.wait(30)
        raise LookupError

    async def read() -> None:
        reader = PatientReader(timeout_s=0.05)
        assert await reader.read(fails) is None
        released.set()
        while await reader.read(lambda: 1) is None:
            await asyncio.sleep(0.01)

    asyncio.run(read())
    gc.collect()
    assert caplog.records == []


def test_while_a_reading_hangs_nothing_is_returned_and_no_other_begins() -> None:
    released, begun = threading.Event(), []

    def hangs() -> int:
        begun.append(1)
        released.wait(30)
        return 1

    async def read() -> list[int | None]:
        reader = PatientReader(timeout_s=0.05)
        began = time.monotonic()
        first, second = await reader.read(hangs), await reader.read(hangs)
        assert time.monotonic() - began < 10
        released.set()
        while (third := await reader.read(lambda: 3)) is None:
            await asyncio.sleep(0.01)
        return [first, second, third]

    assert asyncio.run(read()) == [None, None, 3]
    assert len(begun) == 1
