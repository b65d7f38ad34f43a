"""Make ids that sort by time: 48 bits of milliseconds and 80 of randomness, 32 hex digits."""

import os
import re
import time

ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""Pattern of a valid id from an app."""
IMPORTED_LOG = "an imported log"
"""Upstream of a policy that holds an imported log, in the place of another server's name."""
SHADOW = ".shadow"
"""A shadow group's id is the id of the trajectory that it was sampled for, plus this suffix."""
HINDSIGHT = "/hindsight"
"""Suffix of the id of an example that words correct. The id of feedback stands before it; or the id of the completion,
and the source of the words behind it."""
PREFERRED = "/prefer"
"""Suffix of the id of an example that is one side of a pair; the completion's id stands before it."""
BY_JUDGE = f"{HINDSIGHT}/judge/"
"""The same where a judge's explanation corrects it; the id of the judgement follows."""

_AT_ONCE = 256
"""Random suffixes that are read with one system call. A system call lets other threads run and then waits for them."""
_endings: list[str] = []


def new_id() -> str:
    """Return a new id. Later ids sort after earlier ids, to the millisecond, which keeps index access local."""
    try:
        ending = _endings.pop()
    except IndexError:
        drawn = os.urandom(10 * _AT_ONCE).hex(" ", 10).split()
        ending = drawn.pop()
        _endings.extend(drawn)
    return (time.time_ns() // 1_000_000).to_bytes(6, "big").hex() + ending


# A child process must not reuse its parent's suffixes.
os.register_at_fork(after_in_child=_endings.clear)


def version_id(policy: str, version: int) -> str:
    """Return the id of a policy version, which is also its name in vLLM."""
    return f"{policy}@v{version}"


def step_id(policy: str, number: int) -> str:
    """Return the id of a step."""
    return f"{policy}#{number}"
