"""Run the proxy as a process: `python -m proxy`.

- On SIGTERM or SIGINT the server accepts nothing new, and answers in flight may continue for `proxy.drain_timeout_s`. A
  second signal ends this wait.
- Answers that are not done then are aborted, as if their app had disconnected, and recorded as aborted.
- Then the records are written, and the process ends with exit code 0. It ends even if something hangs.
- If the thread that writes to SQL has died, the proxy stops by itself in the same order, with exit code 1. A supervisor
  restarts it, and it writes what the journal has.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from proxy.app import Proxy
from proxy.http.server_connection import Connection
from proxy.recording.journal.log import SEGMENT_BYTES
from proxy.recording.writer import CLOSE_TIMEOUT_S
from proxy.tuning import tune_threads
from whetstone.config.proxy import ProxySettings
from whetstone.config.settings import SettingsError, load
from whetstone.observability import tracing
from whetstone.observability.log_setup import set_up
from whetstone.registry.remote.object_store import store_of

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BREAK_OFF_S = 2.0
"""How long the recording of aborted calls may take."""
LAST_S = BREAK_OFF_S + CLOSE_TIMEOUT_S + 8.0
"""The process ends at most this long after the drain."""
FILES_BESIDE = 256
"""Open files other than connections: database, journal, log, control connections to model servers."""
LOOK_EVERY = 10
"""Ticks of uvicorn (0.1 s each) between two checks of the connections."""

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn's server with limits, and a shutdown that loses no record."""

    def __init__(self, app: Proxy, settings: ProxySettings) -> None:
        self._settings = settings
        self._proxy = app
        self._hurry = False
        http: Any = partial(Connection, settings)
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
            # Its warnings are about bad input of clients, one line each.
            log_level="error",
            proxy_headers=False,
            server_header=False,
        )
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        """Check the connections and the writer. uvicorn calls this ten times a second."""
        if counter % LOOK_EVERY == 0:
            self._look()
        if self._proxy.broken and not self.should_exit:
            log.critical("the proxy stops with exit code 1, so that it is started again: see the error above")
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: accept nothing new, let answers end, abort the rest, write the records."""
        for listener in (*self.servers, *(sockets or ())):
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
        """Stop in order at the first signal. No signal is raised again, so that the process ends with 0."""
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
        """Begin to stop at the first signal; stop faster at the second."""
        self._hurry = self.should_exit
        self.should_exit = True
        if not self._hurry:
            _end_after(self._settings.drain_timeout_s + LAST_S)

    async def _quiet(self, seconds: float, *, may_hurry: bool = False) -> bool:
        """Wait until nothing is served any more; return whether that happened in time."""
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
        tune_threads()
        _allow_files(settings.proxy)
        store_of(settings.adapters)
    except SettingsError as error:
        sys.exit(str(error))
    proxy = Proxy(settings)
    Server(proxy, settings.proxy).run()
    sys.exit(1 if proxy.broken else 0)


def _allow_files(settings: ProxySettings) -> None:
    """Raise the kernel's limit of open files to what the settings may need.

    Raises:
        SettingsError: this process may not open so many.
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


def _end_after(seconds: float) -> None:
    """End the process after this time, wherever it hangs: what is not written by then is in the journal."""

    def end() -> None:
        time.sleep(seconds)
        log.error("the proxy did not stop within %g s and is ended; the journal keeps what SQL lacks", seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
