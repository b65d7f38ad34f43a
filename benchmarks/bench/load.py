"""Generate load over persistent connections, as a closed or an open loop, and measure and check each answer."""

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.bench.client import Client, Judge, Target

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
        self._target, self._kind = target, kind
        self._judge = Judge(kind)
        self.took = LoadResult()
        self.clients: list[Client] = []
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, count: int, answered: Callable[[Client], None]) -> None:
        loop = asyncio.get_running_loop()
        for start in range(0, count, OPENED_AT_ONCE):
            size = min(OPENED_AT_ONCE, count - start)
            made = (
                loop.create_connection(lambda: Client(answered, self._lost), self._target.host, self._target.port)
                for _ in range(size)
            )
            self.clients += [client for _, client in await asyncio.gather(*made)]

    def ask(self, client: Client, due_s: float | None = None, on_first: Callable[[], None] | None = None) -> None:
        self.took.sent += 1
        client.ask(self._target.request(self._kind), due_s, on_first)

    def note(self, client: Client) -> float:
        """Record the time of an answer; return when it ended."""
        now_s = time.perf_counter()
        self.took.ms.append((now_s - client.since_s) * 1000)
        self.took.first_ms.append((client.first_s - client.since_s) * 1000)
        if fault := self._judge.wrong(client.status, client.body):
            self.took.faults.append(fault)
            self.over()
        return now_s

    def over(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def wait(self, until_s: float) -> None:
        """Wait until it is over, but not after `until_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until_s - time.perf_counter())):
                await self._over

    async def close(self) -> None:
        """Close all connections, even with requests in flight."""
        self.took.lost += sum(client.busy for client in self.clients)
        for client in self.clients:
            client.close()
        await asyncio.sleep(0)

    def _lost(self, client: Client) -> None:
        self.took.faults.append("a connection broke off" + (" within an answer" if client.busy else ""))
        self.over()


async def closed_loop(target: Target, kind: str, connections: int, seconds: float, spread_s: float = 0.0) -> LoadResult:
    """Send a request on each connection as soon as the last is answered, for `seconds`.

    Connections start within `spread_s`.
    """
    asking, loop = _Asking(target, kind), asyncio.get_running_loop()
    left = connections

    def answered(client: Client) -> None:
        nonlocal left
        if asking.note(client) < until_s:
            asking.ask(client)
        else:
            left -= 1
            if not left:
                asking.over()

    await asking.connect(connections, answered)
    with _collecting_nothing():
        began_s = time.perf_counter()
        until_s = began_s + spread_s + seconds
        for place, client in enumerate(asking.clients):
            if spread_s:
                loop.call_later(spread_s * place / connections, asking.ask, client)
            else:
                asking.ask(client)
        await asking.wait(until_s + PATIENCE_S)
        asking.took.seconds = time.perf_counter() - began_s
    await asking.close()
    return asking.took


async def open_loop(target: Target, kind: str, rate: float, seconds: float) -> LoadResult:
    """Send requests at a fixed rate, even if earlier requests are unanswered. Times run from when each was due."""
    asking = _Asking(target, kind)
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
            asking.over()

    await asking.connect(OPEN_CONNECTIONS, answered)
    free += asking.clients
    # epoll alone wakes a loop to the millisecond, which is more than what has to be measured.
    timer = Ticks(1 / rate)

    def ticked() -> None:
        nonlocal due
        for _ in range(min(timer.passed(), count - due)):
            due += 1
            waiting.append(timer.due_s(due))
        go_on()

    loop = asyncio.get_running_loop()
    with _collecting_nothing(), contextlib.closing(timer):
        timer.start()
        loop.add_reader(timer.fd, ticked)
        await asking.wait(timer.due_s(count) + PATIENCE_S)
        loop.remove_reader(timer.fd)
        asking.took.seconds = time.perf_counter() - timer.due_s(0)
    asking.took.lost += len(waiting) + count - due
    await asking.close()
    return asking.took


class SilentStreams:
    """Streams that have begun and send nothing more. Call `open` first, `close` last."""

    def __init__(self, target: Target, count: int) -> None:
        self._asking, self._count = _Asking(target, "silent"), count
        self.begun = 0

    async def open(self) -> LoadResult:
        """Open all streams; on return each has had its first event, or is lost."""
        began_s = time.perf_counter()
        await self._asking.connect(self._count, lambda _client: self._asking.over())
        for client in self._asking.clients:
            self._asking.ask(client, on_first=self._first)
        await self._asking.wait(time.perf_counter() + 3 * PATIENCE_S)
        took = self._asking.took
        took.seconds, took.lost = time.perf_counter() - began_s, self._count - self.begun
        return took

    def _first(self) -> None:
        self.begun += 1
        if self.begun == self._count:
            self._asking.over()

    async def close(self) -> None:
        """Close all streams."""
        await self._asking.close()


class Ticks:
    """A kernel timer, exact to some microseconds (timerfd)."""

    def __init__(self, every_s: float) -> None:
        self._every_ns = round(every_s * 1e9)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self) -> None:
        """Start the timer; the first tick is one interval from now."""
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


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Switch garbage collection off, so that our own pauses are not measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def merged(parts: list[LoadResult]) -> LoadResult:
    """Merge the results of loads that ran at the same time."""
    whole = LoadResult(max(part.seconds for part in parts))
    for part in parts:
        whole.ms += part.ms
        whole.first_ms += part.first_ms
        whole.faults += part.faults
        whole.sent += part.sent
        whole.lost += part.lost
    return whole
