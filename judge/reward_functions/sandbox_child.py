"""The process that runs a reward function: one JSON line in, one out, until its parent stops it. Standard library only.

`python -P sandbox_child.py <fd of a socket> <package.module:function or path of a program> <timeout_s> <memory_mb>`.
The first line of output reports whether the function exists. It is bounded by its own limits here, and by the parent,
which kills the process group when an answer is late. If the parent is gone, the process and its program end by
themselves a little later.
"""

import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

FILE_BYTES = 64 * 2**20
"""Largest file it may write; a program's input and output are files too."""
ANSWER_BYTES = 2**20
"""Longest answer."""
GRACE_S = 2.0
"""The process ends itself this much later than its parent would end it."""
NICENESS = 5
"""It yields to serving as training does."""

Function = Callable[[str], str]
"""Trajectory -> answer, both JSON."""


class ProgramFailed(Exception):
    """A program gave no answer; the message gives the reason."""


def main(fd: int, run: str, timeout_s: float, memory_mb: int) -> None:
    """Answer until the socket is closed."""
    limits = {resource.RLIMIT_AS: memory_mb * 2**20, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    os.nice(NICENESS)
    wire = socket.socket(fileno=fd)
    try:
        # A path; else it is `package.module:function`.
        function = _program(run, timeout_s) if os.sep in run or ":" not in run else _python(run)
    except BaseException as error:  # a module may raise anything, SystemExit included
        _send(wire, {"error": explained(error)})
        return
    _send(wire, {"ready": True})
    me = os.getpid()
    for line in wire.makefile(encoding="utf-8"):
        _allow(timeout_s)
        try:
            reply = {"answer": function(line)}
        except BaseException as error:
            reply = {"error": explained(error)}
        if os.getpid() != me:
            os._exit(0)  # a copy that the function forked and that returned
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(wire, reply)


def explained(error: BaseException) -> str:
    """Return an error as one short line: its class, and the first line of its message."""
    message = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, ProgramFailed):
        return message[:300]
    return f"{type(error).__name__}: {message}"[:300] if message else type(error).__name__


def how_ended(code: int) -> str:
    """Describe an exit code, or the signal that killed the process."""
    return f"ended with code {code}" if code >= 0 else f"was killed ({signal.strsignal(-code) or -code})"


def _allow(timeout_s: float) -> None:
    """Allow `timeout_s` of CPU from now on, so that what escapes the process group ends too; limit the clock too."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + timeout_s) + 1, hard))


def _send(wire: socket.socket, reply: dict[str, Any]) -> None:
    wire.sendall(json.dumps(reply).encode() + b"\n")


def _python(run: str) -> Function:
    module, _, name = run.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{run} cannot be called")

    def call(line: str) -> str:
        # Numbers of libraries (numpy's float32, Decimal) are numbers too.
        answer = json.dumps(function(json.loads(line)), default=float)
        if len(answer) > ANSWER_BYTES:
            raise ProgramFailed(f"answered more than {ANSWER_BYTES} bytes")
        return answer

    return call


def _program(run: str, timeout_s: float) -> Function:
    path = shutil.which(run)
    if path is None:
        raise FileNotFoundError(f"there is no program {run} that may be executed")

    def call(line: str) -> str:
        # Files, not pipes: processes that the program leaves running may keep a pipe open, and would block us.
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            given.write(line.encode())
            given.seek(0)
            code = subprocess.call(
                [path], stdin=given, stdout=out, stderr=err, cwd=folder, timeout=timeout_s + GRACE_S / 2
            )
            out.seek(0)
            answer = out.read(ANSWER_BYTES + 1)
            if code != 0:
                raise ProgramFailed(": ".join(filter(None, (how_ended(code), _last_line(err)))))
        if len(answer) > ANSWER_BYTES:
            raise ProgramFailed(f"answered more than {ANSWER_BYTES} bytes")
        return answer.decode("utf-8", "replace")

    return call


def _last_line(err: Any) -> str:
    err.seek(max(0, err.seek(0, os.SEEK_END) - 4096))
    lines = err.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
