"""Tune the process for the event loop, which apps wait for, beside the thread that writes to SQL.

Each setting states the figure that it bought; `docs/log/` has the measurements.
"""

import ctypes
import gc
import sys
import time
from contextlib import suppress

SWITCH_S = 0.0001
"""How long a thread keeps the interpreter while another waits for it: an app waits while the thread that writes to SQL
has it. Python's default is fifty times that. With `nap`, 0.1 ms instead of 0.5 took the p99 that the proxy adds at
1,000 requests a second from 3.4 ms to 3.0, and its p50 from 0.43 ms to 0.30."""
NAP_EVERY, NAP_S = 3, 0.00005
"""The writer naps for NAP_S after every NAP_EVERY rows made, and between inserts of few rows. The event loop then gets
the interpreter and the core, and need not wait for a whole transaction's rows. Linux hands over a core when a thread
sleeps, otherwise at the next clock tick, 4 ms apart on most systems. It took the added p99 from 4.5 ms to 3.4."""
ARENAS = 2
"""Arenas of malloc: one for the event loop, one for threads. Memory that is free in one arena is of no use in another:
after 30,000 requests 3 MiB were free and of no use to other threads, 16 MiB with malloc's default. The memory of a soak
of 15 minutes grew by 6.8 %, by 9.5 % with the default."""
MAP_FROM_BYTES = 256 * 2**10
"""Blocks of at least this size are returned to the system as soon as they are free. By default malloc raises this
threshold to the size of what it has returned before. Then the tables of cached calls, which are rebuilt again and
again, leave holes in an arena. Together with SQLite's open connections and small page caches it took the growth of that
soak from 6.8 % to 3.3 %."""
COLLECT_AFTER = (50_000, 20, 50)
"""Thresholds of the garbage collector: objects allocated and not freed, then collections of the younger generations.
With Python's defaults the collector took a quarter of the event loop's time: it walked cached calls again and again."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
"""glibc's names for ARENAS and MAP_FROM_BYTES (malloc.h)."""


def tune_threads() -> None:
    """Set how threads share memory and the interpreter. Call it before the first thread starts."""
    with suppress(AttributeError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, MAP_FROM_BYTES)
    sys.setswitchinterval(SWITCH_S)


def tune_collector() -> None:
    """Exclude the objects made so far from garbage collection, and collect seldom: reference counts free what requests
    leave behind. Call it when everything is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def nap() -> None:
    """Let the event loop go first."""
    time.sleep(NAP_S)
