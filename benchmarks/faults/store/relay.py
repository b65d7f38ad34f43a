"""A TCP relay before a server, which cuts, delays or stops its connections. Linux and loopback only."""

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal, get_args

Mode = Literal["open", "slow", "silent", "cut"]
"""`open` forwards; `slow` forwards a few bytes at a time; `silent` forwards nothing; `cut` resets every connection."""
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNK_BYTES = 16 * 1024
SLOW_BYTES, SLOW_S = 2048, 0.02
"""100 KB a second."""
LOOK_S = 0.02
OPEN_SHARE = 0.33
"""Of the changes; of the others each mode has an equal part."""


class FaultyRelay:
    """Forwards connections at `port` to a server on this machine, as its mode says."""

    def __init__(self, target_port: int) -> None:
        self.mode: Mode = "open"
        self._target = ("127.0.0.1", target_port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self.cuts = 0
        """Connections that were reset."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """End all connections and the listening."""
        self._ended.set()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                _reset(client)
                continue
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            source.settimeout(LOOK_S)
            while not self._ended.is_set():
                if self.mode == "cut":
                    self.cuts += 1
                    _reset(source)
                    _reset(sink)
                    return
                if self.mode == "silent":
                    time.sleep(LOOK_S)
                    continue
                is_slow = self.mode == "slow"
                try:
                    chunk = source.recv(SLOW_BYTES if is_slow else CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not chunk:
                    sink.shutdown(socket.SHUT_WR)
                    return
                if is_slow:
                    time.sleep(SLOW_S)
                sink.sendall(chunk)


def _reset(connection: socket.socket) -> None:
    """Close a connection so that its other end gets an error, not an end."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


@contextlib.contextmanager
def at_random(relay: FaultyRelay, rng: random.Random) -> Iterator[Counter[str]]:
    """Change the relay's mode at random moments; yield the seconds in each mode so far."""
    seconds: Counter[str] = Counter()
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            relay.mode = "open" if rng.random() < OPEN_SHARE else rng.choice(MODES)
            began = time.monotonic()
            ended.wait(rng.uniform(0.2, 2.0))
            seconds[relay.mode] += time.monotonic() - began  # type: ignore[assignment]
        relay.mode = "open"

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()
