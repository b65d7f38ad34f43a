"""Ids that sort by time: 48 bits of milliseconds and 80 of randomness, 32 hex digits. Knows no table."""

import os
import re
import time

ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""What an id given by an app may be."""
SHADOW = ".shadow"
"""A shadow group's id is that of the trajectory it was drawn for, and this."""


_AT_ONCE = 256
"""Random endings drawn by one call of the system, which lets other threads run and then waits for them."""
_endings: list[str] = []


def new_id() -> str:
    """A fresh id. Later ones sort after earlier ones to the millisecond, which keeps indexes local."""
    try:
        ending = _endings.pop()
    except IndexError:
        drawn = os.urandom(10 * _AT_ONCE).hex(" ", 10).split()
        ending = drawn.pop()
        _endings.extend(drawn)
    return (time.time_ns() // 1_000_000).to_bytes(6, "big").hex() + ending


# A child must not go on with its parent's.
os.register_at_fork(after_in_child=_endings.clear)


def version_id(policy: str, version: int) -> str:
    """A policy version's id; also what vLLM calls it."""
    return f"{policy}@v{version}"


def step_id(policy: str, number: int) -> str:
    """A step's id."""
    return f"{policy}#{number}"
