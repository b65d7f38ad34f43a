"""The proxy as a process: `python -m proxy`. Knows sockets, signals and the order of stopping; no route.

On SIGTERM or SIGINT nothing new is taken, and what is being answered may go on for `proxy.drain_timeout_s`; a second
signal hurries. What is not done then is broken off, which ends its call as aborted, as if its app had hung up. Then
the records are written, and the process ends with 0. Whatever hangs, it ends. Where the thread that writes to SQL has
died, the proxy stops by itself in the same order, with 1: a supervisor starts it again, and it writes what the journal
has.
"""

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from proxy.app import Proxy
from proxy.connection import Connection, connections
from proxy.journal import SEGMENT_BYTES
from proxy.writer import CLOSE_TIMEOUT_S
from whetstone import tracing
from whetstone.logs import set_up
from whetstone.serving import ProxySettings
from whetstone.settings import SettingsError, load

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BREAK_OFF_S = 2.0
"""How long calls that are broken off may take to be recorded."""
LAST_S = BREAK_OFF_S + CLOSE_TIMEOUT_S + 8.0
"""After the drain the process lives no longer than that."""
FILES_BESIDE = 256
"""Open files besides connections: database, journal, log, model servers' control connections."""
ARENAS = 2
"""Of malloc: one for the event loop, one for threads."""
OWN_BYTES = 256 * 2**10
"""What is as large as this is given back as soon as it is free. By itself malloc raises that to whatever it has given
back before: the tables of what is kept of calls, which are made anew again and again, then leave holes in an arena."""
SWITCH_S = 0.0001
"""How long a thread goes on while another waits for the interpreter: an app waits while the thread that writes to SQL
has it. Python's default is fifty times that."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
"""glibc's names for both (malloc.h)."""
LOOK_EVERY = 10
"""Ticks of uvicorn, of 0.1 s, between two looks at the connections."""

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server with limits, and a stop that loses no record."""

    def __init__(self, app: Proxy, settings: ProxySettings) -> None:
        self._settings = settings
        self._proxy = app
        self._hurry = False
        http: Any = connections(settings)
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http=http,
            ws="none",
            lifespan="on",
            interface="asgi3",
            access_log=False,
            log_config=None,
            # Its warnings are of what strangers send, a line each.
            log_level="error",
            proxy_headers=False,
            server_header=False,
        )
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn calls ten times a second."""
        if counter % LOOK_EVERY == 0:
            self._look()
        if self._proxy.broken and not self.should_exit:
            log.critical("the proxy stops with exit code 1, so that it is started again: see the error above")
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: take nothing new, let answers end, break off the rest, write the records."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if not await self._quiet(self._settings.drain_timeout_s, may_hurry=True):
            log.warning("%d answers are broken off", len(self.server_state.tasks))
            for connection in self._connections():
                connection.give_up()
            await self._quiet(BREAK_OFF_S)
        await self.lifespan.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop in good order at the first signal; none of them is raised again, so that the process ends with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._hurry = self.should_exit
        self.should_exit = True
        if not self._hurry:
            _end_after(self._settings.drain_timeout_s + LAST_S)

    async def _quiet(self, seconds: float, *, may_hurry: bool = False) -> bool:
        """Wait until nothing is served any more; whether that came to be in time."""
        until_s = time.monotonic() + seconds
        looked_s = time.monotonic()
        while self.server_state.tasks or self.server_state.connections:
            now_s = time.monotonic()
            if now_s >= until_s or (may_hurry and self._hurry):
                return False
            if now_s - looked_s > 1:
                self._look()
                looked_s = now_s
            await asyncio.sleep(0.02)
        return True

    def _look(self) -> None:
        now_s = time.monotonic()
        for connection in self._connections():
            connection.look(now_s)

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]


def main() -> None:
    """Run the proxy until a signal; settings come from file and environment."""
    try:
        settings = load()
        set_up(settings.log)
        tracing.start(settings.log, "proxy")
        _share_memory()
        sys.setswitchinterval(SWITCH_S)
        _allow_files(settings.proxy)
    except SettingsError as error:
        sys.exit(str(error))
    proxy = Proxy(settings)
    Server(proxy, settings.proxy).run()
    if proxy.broken:
        sys.exit(1)


def _allow_files(settings: ProxySettings) -> None:
    """Have the kernel allow as many open files as the settings may come to.

    Raises:
        SettingsError: this process may not have so many.
    """
    segments = settings.max_journal_bytes // SEGMENT_BYTES
    needed = settings.max_connections + settings.max_in_flight + segments + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SettingsError(
            f"proxy.max_connections = {settings.max_connections}, proxy.max_in_flight = {settings.max_in_flight} and "
            f"proxy.max_journal_bytes = {settings.max_journal_bytes} need "
            f"{needed} open files, this process may have {hard}: lower them, or raise `ulimit -n`"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _share_memory() -> None:
    """Have threads allocate from few arenas: what is free in one serves no other, and memory creeps up with many."""
    with suppress(AttributeError):  # of glibc alone
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, OWN_BYTES)


def _end_after(seconds: float) -> None:
    """End the process then, wherever it hangs: what is not written by then is in the journal."""

    def end() -> None:
        log.error("the proxy did not stop within %g s and is ended; the journal keeps what SQL lacks", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
