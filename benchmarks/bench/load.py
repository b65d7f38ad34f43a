"""Generate load over persistent connections, as a closed or an open loop, and measure and check each answer."""

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from benchmarks.bench.client import Client, Target, wrong_with

PATIENCE_S = 10.0
"""How long to wait for the last answers after the end; then they count as lost."""
OPEN_CONNECTIONS = 64
"""Most requests at once of an open loop: with more, a due request waits, and its time runs."""
OPENED_AT_ONCE = 50
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
"""Linux constants: the clock of `time.perf_counter`, and the flag that a timer's start is an absolute time."""


@dataclass
class LoadResult:
    """The result of a period of load."""

    seconds: float = 0.0
    ms: list[float] = field(default_factory=list)
    """Time of each answer, from when it was sent, or due, to its end."""
    first_ms: list[float] = field(default_factory=list)
    """The same, to its first byte."""
    sent: int = 0
    lost: int = 0
    """Sent or due, and not answered in time."""
    faults: list[str] = field(default_factory=list)


class _Asking:
    """The part that all forms of load share: clients, results, and the end."""

    def __init__(self, target: Target, kind: str) -> None:
        self._target, self._kind, self._right = target, kind, b""
        self.took = LoadResult()
        self.clients: list[Client] = []
        self.over = asyncio.Event()

    def ask(self, client: Client, due_s: float | None = None, on_first: Callable[[], None] | None = None) -> None:
        self.took.sent += 1
        client.ask(self._target.request(self._kind), due_s, on_first)

    def note(self, client: Client) -> float:
        """Record the time of an answer, and check it; return when it ended.

        An answer equal to the last right one is not parsed again.
        """
        now_s = time.perf_counter()
        self.took.ms.append((now_s - client.since_s) * 1000)
        self.took.first_ms.append((client.first_s - client.since_s) * 1000)
        status, body = client.answer
        if status == 200 and body == self._right:
            return now_s
        if fault := wrong_with(self._kind, status, body):
            self.took.faults.append(fault)
            self.over.set()
        else:
            self._right = body
        return now_s

    async def wait(self, until_s: float) -> None:
        """Wait until it is over, but not after `until_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), max(0.0, until_s - time.perf_counter()))

    def broke_off(self, client: Client) -> None:
        self.took.faults.append("a connection broke off" + (" within an answer" if client.busy else ""))
        self.over.set()


@contextlib.asynccontextmanager
async def _connected(
    target: Target, kind: str, count: int, answered: Callable[[Client], None]
) -> AsyncIterator[_Asking]:
    """Open connections, and close them at the end, even with requests in flight.

    Garbage collection is off meanwhile, so that our own pauses are not measured.
    """
    asking, loop = _Asking(target, kind), asyncio.get_running_loop()
    for start in range(0, count, OPENED_AT_ONCE):
        made = (
            loop.create_connection(lambda: Client(answered, asking.broke_off), *target.address)
            for _ in range(min(OPENED_AT_ONCE, count - start))
        )
        asking.clients += [client for _, client in await asyncio.gather(*made)]
    gc.collect()
    gc.disable()
    try:
        yield asking
    finally:
        gc.enable()
    asking.took.lost += sum(client.busy for client in asking.clients)
    for client in asking.clients:
        client.close()
    await asyncio.sleep(0)


async def closed_loop(target: Target, kind: str, connections: int, seconds: float, spread_s: float = 0.0) -> LoadResult:
    """Send a request on each connection as soon as the last is answered, for `seconds`.

    Connections start within `spread_s`.
    """
    left = connections

    def answered(client: Client) -> None:
        nonlocal left
        if asking.note(client) < until_s:
            asking.ask(client)
        else:
            left -= 1
            if not left:
                asking.over.set()

    async with _connected(target, kind, connections, answered) as asking:
        began_s = time.perf_counter()
        until_s = began_s + spread_s + seconds
        for place, client in enumerate(asking.clients):
            asyncio.get_running_loop().call_later(spread_s * place / connections, asking.ask, client)
        await asking.wait(until_s + PATIENCE_S)
        asking.took.seconds = time.perf_counter() - began_s
    return asking.took


async def open_loop(target: Target, kind: str, rate: float, seconds: float) -> LoadResult:
    """Send requests at a fixed rate, even if earlier requests are unanswered. Times run from when each was due."""
    free: list[Client] = []
    waiting: deque[float] = deque()
    count, due = int(rate * seconds), 0

    def answered(client: Client) -> None:
        asking.note(client)
        free.append(client)
        go_on()

    def go_on() -> None:
        while waiting and free:
            asking.ask(free.pop(), waiting.popleft())
        if due == count and not waiting and len(free) == len(asking.clients):
            asking.over.set()

    def ticked() -> None:
        nonlocal due
        for _ in range(min(timer.passed(), count - due)):
            due += 1
            waiting.append(timer.due_s(due))
        go_on()

    async with _connected(target, kind, OPEN_CONNECTIONS, answered) as asking:
        free += asking.clients
        loop = asyncio.get_running_loop()
        # epoll alone wakes a loop to the millisecond, which is more than what has to be measured.
        with contextlib.closing(Ticks(1 / rate)) as timer:
            loop.add_reader(timer.fd, ticked)
            await asking.wait(timer.due_s(count) + PATIENCE_S)
            loop.remove_reader(timer.fd)
            asking.took.seconds = time.perf_counter() - timer.due_s(0)
        asking.took.lost += len(waiting) + count - due
    return asking.took


@contextlib.asynccontextmanager
async def silent_streams(target: Target, count: int) -> AsyncIterator[LoadResult]:
    """Open streams that have one event and nothing more, until the end; yield once each has it, or is lost."""
    begun, began_s = 0, time.perf_counter()

    def first() -> None:
        nonlocal begun
        begun += 1
        if begun == count:
            asking.over.set()

    async with _connected(target, "silent", count, lambda _client: asking.over.set()) as asking:
        for client in asking.clients:
            asking.ask(client, on_first=first)
        await asking.wait(time.perf_counter() + 3 * PATIENCE_S)
        asking.took.seconds, asking.took.lost = time.perf_counter() - began_s, count - begun
        yield asking.took


class Ticks:
    """A kernel timer, exact to some microseconds (timerfd). The first tick is one interval from its creation."""

    def __init__(self, every_s: float) -> None:
        self._every_ns = round(every_s * 1e9)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._start_ns = time.perf_counter_ns()
        times = (self._every_ns, self._start_ns + self._every_ns)
        words = [word for nanoseconds in times for word in divmod(nanoseconds, 10**9)]
        if self._libc.timerfd_settime(self.fd, _ABSOLUTE, (ctypes.c_long * 4)(*words), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def due_s(self, tick: int) -> float:
        """Return when the tick of this number, from 1 on, is due by `time.perf_counter`."""
        return (self._start_ns + tick * self._every_ns) / 1e9

    def passed(self) -> int:
        """Return the ticks since the last call."""
        try:
            return int.from_bytes(os.read(self.fd, 8), "little")
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.fd)


def merged(parts: list[LoadResult]) -> LoadResult:
    """Merge the results of loads that ran at the same time."""
    return LoadResult(
        seconds=max(part.seconds for part in parts),
        ms=[ms for part in parts for ms in part.ms],
        first_ms=[ms for part in parts for ms in part.first_ms],
        sent=sum(part.sent for part in parts),
        lost=sum(part.lost for part in parts),
        faults=[fault for part in parts for fault in part.faults],
    )
