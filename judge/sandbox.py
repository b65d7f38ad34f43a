"""Runs reward functions in processes of their own, bounded in time and memory. Knows no table and no reward.

It bounds accidents: a loop without end, a leak, a crash. It is no wall against hostile code: the process is the same
user's, and the network is there.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from judge import child
from whetstone.worth import RewardFunction

START_S = 60.0
"""How long a process may take to start and to import the function's module."""
LINE_BYTES = 8 * child.ANSWER_BYTES
"""Longest line read from a process: an answer, each of its characters escaped."""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
"""All that a function sees of the worker's environment, besides where Python finds modules: no settings, no keys."""


class SaidNothing(Exception):
    """A function gave no answer; the message says why, for admins and in SQL."""


class NotFound(SaidNothing):
    """There is no such function or program, or its module cannot be imported."""


class Sandbox:
    """One reward function, asked about one trajectory after the other. Used from one thread.

    A process serves until it fails; the next trajectory gets a fresh one. Starting Python for each would cost more than
    most functions do.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._process: _Process | None = None
        self._not_found: NotFound | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()

    def start(self) -> None:
        """Have a process that has found the function.

        Raises:
            NotFound: it did not find it; it is not looked for again.
        """
        if self._not_found is not None:
            raise self._not_found
        if self._process is None:
            self._process = _Process(self._function)
            try:
                _checked(self._process.read(START_S))
            except SaidNothing as error:
                self._stop()
                self._not_found = NotFound(str(error))
                raise self._not_found from error

    def ask(self, trajectory: bytes) -> str:
        """The function's answer, as JSON, to a trajectory, as JSON without line breaks.

        Raises:
            NotFound: there is no such function.
            SaidNothing: it raised, ran out of time or memory, or broke otherwise.
        """
        self.start()
        assert self._process is not None
        try:
            said = self._process.exchange(trajectory, self._function.timeout_s)
        except SaidNothing:
            self._stop()
            raise
        return str(_checked(said).get("answer"))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class _Process:
    """A child process, its socket and its folder."""

    def __init__(self, function: RewardFunction) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whetstone-reward-", ignore_cleanup_errors=True)
        self._wire, theirs = socket.socketpair()
        run = str(Path(function.run).absolute()) if os.sep in function.run else function.run
        limits = [str(function.timeout_s), str(function.memory_mb)]
        # -P: the judge's own modules must not stand before the standard library's.
        command = [sys.executable, "-P", child.__file__, str(theirs.fileno()), run, *limits]
        with theirs:
            self._popen = subprocess.Popen(
                command,
                cwd=self._folder.name,
                env=_environment(self._folder.name),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def exchange(self, line: bytes, timeout_s: float) -> dict[str, object]:
        """Send a line and read one.

        Raises:
            SaidNothing: it did not come in time, or the process has died.
        """
        began = time.monotonic()
        self._wire.settimeout(timeout_s)
        try:
            self._wire.sendall(line + b"\n")
        except TimeoutError:
            raise SaidNothing(_too_late(timeout_s)) from None
        except OSError:
            raise SaidNothing(self._death()) from None
        return self.read(timeout_s - (time.monotonic() - began), timeout_s)

    def read(self, left_s: float, of_s: float | None = None) -> dict[str, object]:
        """Read a line within `left_s` seconds (of `of_s` in all).

        Raises:
            SaidNothing: it did not come, is no line of ours, or says that there will be none.
        """
        deadline = time.monotonic() + left_s
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wire.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                more = self._wire.recv(2**16)
            except TimeoutError:
                raise SaidNothing(_too_late(of_s or left_s)) from None
            except OSError:
                more = b""
            if not more or len(line) > LINE_BYTES:
                raise SaidNothing(self._death())
            line += more
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                return said
        raise SaidNothing("it wrote into the socket that its answers go through")

    def kill(self) -> int:
        """End it and all it has started; return its exit code."""
        if self._popen.returncode is None:
            # Before it is waited for: until then its number is nobody else's.
            os.killpg(self._popen.pid, signal.SIGKILL)
        code = self._popen.wait()
        self._wire.close()
        self._folder.cleanup()
        return code

    def _death(self) -> str:
        return f"it {child.how_ended(self.kill())}"


def _checked(said: dict[str, object]) -> dict[str, object]:
    if "error" in said:
        raise SaidNothing(str(said["error"]))
    return said


def _too_late(timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} s"


def _environment(folder: str) -> dict[str, str]:
    """What a function sees: modules are found as the worker finds them, files go into a folder that is deleted."""
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *paths]),
        "TMPDIR": folder,
        # Each function's process is one of many beside a busy vLLM; and threads take address space.
        "OMP_NUM_THREADS": "1",
    }
