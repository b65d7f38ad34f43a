"""One stack on a data folder: a lock that ends with the process that holds it. Knows no stack."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whetstone.settings import SettingsError

LOCK = "up.lock"


@contextmanager
def alone(data: Path) -> Iterator[None]:
    """Be the only one who uses the data folder.

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


def in_use(data: Path) -> bool:
    """Whether somebody is `alone` there at this moment."""
    try:
        with (data / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
