"""Run background tasks for as long as the proxy lives, and count errors that belong to no request.

- A task calls its function periodically. No error ends the task.
- A task whose last call failed is in `failing`, which `/readyz` shows.
- Errors of the outside world (database, disk, model server) are logged in one line. All others are logged with their
  trace and counted in `unexpected`. Each error is logged once, until a call succeeds or another error occurs.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import ProxyError

OUTSIDE = (SQLAlchemyError, OSError, ProxyError)
"""Errors of the outside world: database, disk and network, model servers."""

unexpected: Counter[str] = Counter({"writer": 0})
"""Number of internal errors (not of the outside world), by part. Parts without an error are present with 0; otherwise
Prometheus would not see the first one as an increase."""

log = logging.getLogger(__name__)


def note_unexpected(part: str, what: str, error: BaseException) -> None:
    """Count an error and log it with its trace."""
    unexpected[part] += 1
    log.error("%s failed: %s: %s", what, type(error).__name__, error, exc_info=error)


class Background:
    """Starts background tasks and tracks which of them fail. Used from one event loop."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}
        """Error text of each task whose last call failed, by task name."""

    def every(
        self, seconds: float, name: str, turn: Callable[[], Awaitable[None]], at_once: asyncio.Event | None = None
    ) -> "asyncio.Task[None]":
        """Call `turn` every `seconds`, or as soon as `at_once` is set, until the task is cancelled."""
        unexpected[name] += 0
        return asyncio.ensure_future(self._run(seconds, name, turn, at_once or asyncio.Event()))

    async def _run(
        self, seconds: float, name: str, turn: Callable[[], Awaitable[None]], at_once: asyncio.Event
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await at_once.wait()
            except TimeoutError:
                pass
            at_once.clear()
            try:
                await turn()
            except (Exception, asyncio.CancelledError) as error:
                # Something that the call waited for may have been cancelled, not this task.
                if task.cancelling():
                    raise
                self._failed(name, error)
            else:
                if self.failing.pop(name, None) is not None:
                    log.warning("%s: works again", name)

    def _failed(self, name: str, error: BaseException) -> None:
        kind, before = type(error).__name__, self.failing.get(name, "")
        # As text: the error object would keep alive everything in its frames.
        self.failing[name] = f"{kind}: {error}"
        if before.partition(":")[0] == kind:
            return
        if isinstance(error, OUTSIDE):
            log.warning("%s: failed, trying again: %s: %s", name, kind, error)
        else:
            note_unexpected(name, name, error)
