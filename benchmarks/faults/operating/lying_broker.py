"""A Redis that lies: clients connect to it, and messages that they push to a queue get lost, come twice or come late.

It stands between clients and a real Redis, and reads their commands (RESP 2): `LPUSH queue message` becomes `LLEN
queue`, which answers a number too, where the message is lost or comes later, and `LPUSH queue message message` where it
comes twice.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

MOST_LATE_S = 3.0


@dataclass
class Lies:
    """Which share of the messages meets what; the rest is delivered."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    """Late ones are also out of order."""


@dataclass
class LyingBroker:
    """Listens on the socket `path`, in front of the Redis on `real`; a thread of its own."""

    path: Path
    real: Path
    queues: Sequence[str]
    seed: int
    lies: Lies = field(default_factory=Lies)
    counts: Counter[str] = field(default_factory=Counter)
    """Messages by what was done to them."""

    def start(self) -> None:
        """Return when it listens."""
        self._dice, self._listening = random.Random(self.seed), threading.Event()
        self._clients: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), name="broker", daemon=True)
        self._thread.start()
        self._listening.wait()

    def stop(self) -> None:
        """End its connections and its thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _listen(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._serve, self.path)
        self._listening.set()
        await self._stopping.wait()
        server.close()
        while self._clients:
            for writer in self._clients:
                writer.close()
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._client(writer), suppress(OSError, asyncio.IncompleteReadError):
            answers, commands = await asyncio.open_unix_connection(self.real)
            with closing(commands):
                answering = asyncio.ensure_future(_copy(answers, writer))
                try:
                    while True:
                        commands.write(_encoded(self._changed(await _command(reader))))
                        await commands.drain()
                finally:
                    answering.cancel()

    @contextmanager
    def _client(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._clients.add(writer)
        try:
            with closing(writer):
                yield
        finally:
            self._clients.discard(writer)

    def _changed(self, command: list[bytes]) -> list[bytes]:
        is_message = len(command) == 3 and command[0].upper() == b"LPUSH" and command[1].decode() in self.queues
        if not is_message:
            return command
        fate, lies = self._dice.random(), self.lies
        if fate < lies.lost:
            self.counts["lost"] += 1
            return [b"LLEN", command[1]]
        if fate < lies.lost + lies.twice:
            self.counts["twice"] += 1
            return [*command, command[2]]
        if fate < lies.lost + lies.twice + lies.late:
            self.counts["late"] += 1
            self._loop.call_later(self._dice.uniform(0, MOST_LATE_S), self._push, command)
            return [b"LLEN", command[1]]
        self.counts["delivered"] += 1
        return command

    def _push(self, command: list[bytes]) -> None:
        async def push() -> None:
            with suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self.real)
                with closing(writer):
                    writer.write(_encoded(command))
                    await reader.readline()

        self._loop.create_task(push())


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    """Read a command: an array of strings.

    Raises:
        IncompleteReadError: the client has gone.
    """
    head = await reader.readuntil(b"\r\n")
    arguments = []
    for _ in range(int(head[1:])):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        arguments.append((await reader.readexactly(length + 2))[:-2])
    return arguments


def _encoded(command: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in command)
