"""Run reward functions in processes of their own, bounded in time and memory.

It limits accidents: an endless loop, a leak, a crash. It does not protect against hostile code: the process belongs to
the same user and has network access.
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

from judge.errors import JudgeError
from judge.reward_functions import sandbox_child
from whetstone.config.rewards import RewardFunction

START_S = 60.0
"""How long a process may take to start and to import the function's module."""
LINE_BYTES = 8 * sandbox_child.ANSWER_BYTES
"""Longest line read from a process: an answer with each of its characters escaped."""
PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
"""The part of the worker's environment that a function sees, besides Python's module path: no settings, no keys."""


class NoReward(JudgeError):
    """A function gave no answer; the message gives the reason, for admins and in SQL."""


class NotFound(NoReward):
    """There is no such function or program, or its module cannot be imported."""


class Sandbox:
    """One reward function, called for one trajectory after the other. Used from one thread. Close it in the end.

    A process serves until it fails; the next trajectory gets a new one. Starting Python for each would cost more than
    most functions do.
    """

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._process: _Process | None = None
        self._not_found: NotFound | None = None

    def start(self) -> None:
        """Start a process that has loaded the function, if there is none.

        Raises:
            NotFound: the function does not exist; later calls raise this at once.
        """
        if self._not_found is not None:
            raise self._not_found
        if self._process is None:
            self._process = _Process(self._function)
            try:
                _checked(self._process.exchange(b"", START_S))
            except NoReward as error:
                self.close()
                self._not_found = NotFound(str(error))
                raise self._not_found from error

    def ask(self, trajectory: bytes) -> str:
        """Return the function's answer, as JSON, for a trajectory, as JSON without line breaks.

        Raises:
            NotFound: there is no such function.
            NoReward: it raised, exceeded its time or memory, or failed in another way.
        """
        self.start()
        assert self._process is not None
        try:
            reply = self._process.exchange(trajectory + b"\n", self._function.timeout_s)
        except NoReward:
            self.close()
            raise
        return str(_checked(reply).get("answer"))

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process = None


class _Process:
    """A child process, its socket and its folder."""

    def __init__(self, function: RewardFunction) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whetstone-reward-", ignore_cleanup_errors=True)
        self._wire, theirs = socket.socketpair()
        run = str(Path(function.run).absolute()) if os.sep in function.run else function.run
        # -P: the judge's own modules must not hide those of the standard library.
        command = [
            sys.executable,
            "-P",
            sandbox_child.__file__,
            str(theirs.fileno()),
            run,
            *map(str, (function.timeout_s, function.memory_mb)),
        ]
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
        """Send a line, if there is one, and read one.

        Raises:
            NoReward: no line came in time, it has another format or reports an error, or the process has died.
        """
        deadline = time.monotonic() + timeout_s
        reply = bytearray()
        try:
            self._wire.settimeout(timeout_s)
            if line:  # even nothing cannot be sent to a process that has ended, and its reply would be lost
                self._wire.sendall(line)
            while not reply.endswith(b"\n"):
                self._wire.settimeout(max(deadline - time.monotonic(), 0.001))
                more = self._wire.recv(2**16)
                if not more or len(reply) > LINE_BYTES:
                    raise ConnectionError
                reply += more
        except TimeoutError:
            raise NoReward(f"it took longer than {timeout_s:g} s") from None
        except OSError:
            raise NoReward(f"it {sandbox_child.how_ended(self.kill())}") from None
        with contextlib.suppress(ValueError):
            parsed = json.loads(reply)
            if isinstance(parsed, dict):
                return parsed
        raise NoReward("it wrote into the socket that its answers go through")

    def kill(self) -> int:
        """Kill the process and all that it has started; return its exit code."""
        with self._folder, self._wire:
            if self._popen.returncode is None:
                # Before `wait`: until then no other process can have its number.
                os.killpg(self._popen.pid, signal.SIGKILL)
            return self._popen.wait()


def _checked(reply: dict[str, object]) -> dict[str, object]:
    if "error" in reply:
        raise NoReward(str(reply["error"]))
    return reply


def _environment(folder: str) -> dict[str, str]:
    """Return a function's environment: modules are searched as in the worker, files go into a temporary folder."""
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **{name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *paths]),
        "TMPDIR": folder,
        # Many such processes run beside a busy vLLM, and threads use address space.
        "OMP_NUM_THREADS": "1",
    }
