"""Tasks that run beside the requests for as long as the proxy lives, and errors that no request is answered with.

- A task is a turn that is taken every so often. No error ends it: the next turn comes as usual.
- A task whose last turn failed is in `failing`, which `/readyz` shows.
- Errors of the outside world (database, disk, model server) are logged in one line, all others with their trace and
  counted in `unexpected`. Either is logged once, until a turn succeeds or another error comes.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import ProxyError

OUTSIDE = (SQLAlchemyError, OSError, ProxyError)
"""What the outside world does: database, disk and network, model servers."""

unexpected: Counter[str] = Counter({"writer": 0})
"""Errors of this process that are none of the outside world's, by the part in which they came up. Parts without any
are there with 0, or Prometheus would not see the first one as an increase."""

log = logging.getLogger(__name__)


def note_unexpected(part: str, what: str, error: BaseException) -> None:
    """Count an error and log it with its trace."""
    unexpected[part] += 1
    log.error("%s failed: %s: %s", what, type(error).__name__, error, exc_info=error)


class Background:
    """Starts such tasks and knows which of them fail. Used from one event loop."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}
        """Name of each task whose last turn failed, and its error in words."""

    def every(
        self, seconds: float, name: str, turn: Callable[[], Awaitable[None]], at_once: asyncio.Event | None = None
    ) -> "asyncio.Task[None]":
        """Take a turn every so many seconds, or as soon as `at_once` is set, until the task is cancelled."""
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
                # Something that the turn waited for may have been cancelled, and not this task.
                if task.cancelling():
                    raise
                self._failed(name, error)
            else:
                if self.failing.pop(name, None) is not None:
                    log.warning("%s: works again", name)

    def _failed(self, name: str, error: BaseException) -> None:
        kind, before = type(error).__name__, self.failing.get(name, "")
        # As text: the error itself would keep alive all that its frames hold.
        self.failing[name] = f"{kind}: {error}"
        if before.partition(":")[0] == kind:
            return
        if isinstance(error, OUTSIDE):
            log.warning("%s: failed, trying again: %s: %s", name, kind, error)
        else:
            note_unexpected(name, name, error)
