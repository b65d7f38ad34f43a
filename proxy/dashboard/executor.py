"""Run page rendering in a few threads, so that pages never take all database connections from requests."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

THREADS = 4

P = ParamSpec("P")
R = TypeVar("R")

_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ui")


async def in_page_thread(do: Callable[P, R], *args: P.args, **values: P.kwargs) -> R:
    """Run `do` in one of these threads, with the caller's context; return its result."""
    work: Callable[[], Any] = partial(copy_context().run, do, *args, **values)
    done: R = await asyncio.get_running_loop().run_in_executor(_pool, work)
    return done
