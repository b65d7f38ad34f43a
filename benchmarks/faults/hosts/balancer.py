"""A TCP load balancer before several proxies: connections in turns, to those that can be reached. Loopback only."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

CONNECT_S = 2.0

Address = tuple[str, int]


class Balancer:
    """Forwards connections at `url` to `addresses`; one that cannot be reached is left out for that connection."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses, self._turns = list(addresses), itertools.count()
        self._open: dict[Address, int] = dict.fromkeys(addresses, 0)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serves = threading.Event()
        self.url = ""

    def connections(self, address: Address) -> int:
        """Return how many connections to it are open: no more requests are in flight there."""
        return self._open[address]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve from a thread until the context ends."""
        ended = asyncio.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._main(ended)), daemon=True)
        thread.start()
        self._serves.wait()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(ended.set)
            thread.join()

    async def _main(self, ended: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._serves.set()
        await ended.wait()
        server.close()
        for writer in self._writers:
            writer.close()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turns)
        for place in range(len(self._addresses)):
            address = self._addresses[(first + place) % len(self._addresses)]
            try:
                source, sink = await asyncio.wait_for(asyncio.open_connection(*address), CONNECT_S)
            except (OSError, TimeoutError):
                continue
            self._open[address] += 1
            self._writers |= {writer, sink}
            await asyncio.gather(_forward(reader, sink), _forward(source, writer))
            self._writers -= {writer, sink}
            self._open[address] -= 1
            return
        writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
