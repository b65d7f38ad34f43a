"""Allow one stack per data folder: a lock that ends with the process that holds it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whetstone.config.settings import SettingsError

LOCK = "up.lock"


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
            raise SettingsError(
                f"a stack runs on {data} already (process {lock.read().strip() or 'unknown'}); stop it or use --data"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


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
