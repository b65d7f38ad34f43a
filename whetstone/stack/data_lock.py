"""Allow one stack per data folder: a lock that ends with the process that holds it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from whetstone.config.settings import SettingsError

LOCK = "up.lock"
STOPPING = "stopping"
"""Line that the holder of the lock adds to it before it stops its processes."""


@contextmanager
def exclusive(data: Path) -> Iterator[None]:
    """Hold the lock of the data folder.

    Raises:
        SettingsError: a stack runs on it.
    """
    with (data / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            process = lock.readline().strip() or "unknown"
            raise SettingsError(f"a stack runs on {data} already (process {process}); stop it or use --data") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def mark_stopping(data: Path) -> None:
    """Record for `phase`, in the folder's lock that the caller has, that its processes are being stopped.

    A full disk does not matter: the processes are stopped all the same.
    """
    with suppress(OSError), (data / LOCK).open("a") as lock:
        lock.write(f"\n{STOPPING}")


def phase(data: Path) -> Literal["starting", "stopping"] | None:
    """Return what the process does that holds the folder's lock and has no `up.json`; None if no process holds it."""
    if not is_locked(data):
        return None
    lines = (data / LOCK).read_text().splitlines()
    return "stopping" if lines[1:] == [STOPPING] else "starting"


def is_locked(data: Path) -> bool:
    """Return whether a process holds the folder's `exclusive` lock."""
    try:
        with (data / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
