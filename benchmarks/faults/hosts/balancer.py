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
        self._loop = asyncio.new_event_loop()
        self.url = ""

    def connections(self, address: Address) -> int:
        """Return how many connections to it are open: no more requests are in flight there."""
        return self._open[address]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve from a thread until the context ends."""
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turns)
        for place in range(len(self._addresses)):
            address = self._addresses[(first + place) % len(self._addresses)]
            try:
                target = await asyncio.wait_for(asyncio.open_connection(*address), CONNECT_S)
            except (OSError, TimeoutError):
                continue
            self._open[address] += 1
            try:
                await asyncio.gather(_forward(reader, target[1]), _forward(target[0], writer))
            finally:
                self._open[address] -= 1
            return
        writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
