"""Who waits for the disk, and who shares an fsync. The disk is a function here, which takes as long as a test wants."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from proxy.recording.journal.log import Flusher
from proxy.supervision import Background


class Disk:
    """Takes what was written before an fsync begins; an fsync ends when it is let."""

    def __init__(self) -> None:
        self.written = 0
        self.synced: list[int] = []
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.error: Exception | None = None

    def to_sync(self) -> list[int]:
        return [self.written]

    def sync(self, descriptors: list[int]) -> None:
        self.begun.release()
        self.let.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        self.synced += descriptors


async def turns() -> None:
    """Let everybody who can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def run(main: Callable[[Disk, Flusher], Awaitable[None]]) -> None:
    disk = Disk()

    async def timed() -> None:
        async with asyncio.timeout(20):
            await main(disk, Flusher(disk.to_sync, disk.sync))

    asyncio.run(timed())


def test_who_waits_goes_on_when_what_it_wrote_is_on_the_disk() -> None:
    async def main(disk: Disk, flusher: Flusher) -> None:
        disk.written = 1
        waiting = asyncio.ensure_future(flusher.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        await turns()
        assert not waiting.done()
        disk.let.release()
        await waiting
        assert disk.synced == [1]

    run(main)


def test_those_who_wait_meanwhile_share_the_next_one_which_has_what_they_wrote() -> None:
    async def main(disk: Disk, flusher: Flusher) -> None:
        disk.written = 1
        first = asyncio.ensure_future(flusher.flushed())
        await asyncio.to_thread(disk.begun.acquire)
        others = []
        for written in range(2, 22):
            disk.written = written
            others.append(asyncio.ensure_future(flusher.flushed()))
        await turns()
        disk.let.release()
        await first
        await turns()
        assert not any(other.done() for other in others), "what is on the disk was begun before they wrote"
        disk.let.release()
        await asyncio.gather(*others)
        assert disk.synced == [1, 21]

    run(main)


def test_one_that_hangs_up_takes_nobody_with_it() -> None:
    async def main(disk: Disk, flusher: Flusher) -> None:
        left, stays = (asyncio.ensure_future(flusher.flushed()) for _ in range(2))
        await asyncio.to_thread(disk.begun.acquire)
        left.cancel()
        disk.let.release(2)
        await stays
        assert left.cancelled()

    run(main)


def test_a_disk_that_fails_is_told_to_all_who_wait_and_to_nobody_after_them() -> None:
    async def main(disk: Disk, flusher: Flusher) -> None:
        disk.error = OSError("gone")
        disk.let.release(2)
        for outcome in await asyncio.gather(*(flusher.flushed() for _ in range(3)), return_exceptions=True):
            assert outcome is disk.error
        disk.error = None
        disk.let.release()
        await flusher.flushed()

    run(main)


@pytest.mark.parametrize("error", [None, OSError("gone"), ValueError("odd")])
def test_it_goes_on_by_itself_whatever_the_disk_said(error: Exception | None) -> None:
    async def main(disk: Disk, flusher: Flusher) -> None:
        disk.error = error
        disk.let.release(3)
        background = Background()
        running = background.every(0.001, "sync", flusher.flushed)
        for _ in range(3):
            await asyncio.to_thread(disk.begun.acquire)
        assert background.failing == ({} if error is None else {"sync": f"{type(error).__name__}: {error}"})
        running.cancel()
        disk.let.release(100)
        await flusher.close()

    run(main)
