"""Ids that sort by time: 48 bits of milliseconds and 80 of randomness, 32 hex digits. Knows no table."""

import os
import re
import time

ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
"""What an id given by an app may be."""


def new_id() -> str:
    """A fresh id. Later ones sort after earlier ones to the millisecond, which keeps indexes local."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def version_id(policy: str, version: int) -> str:
    """A policy version's id; also what vLLM calls it."""
    return f"{policy}@v{version}"


def step_id(policy: str, number: int) -> str:
    """A step's id."""
    return f"{policy}#{number}"
