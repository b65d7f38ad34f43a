"""Share one accelerator between vLLM and the trainer: vLLM sleeps during a step, and requests wait in the proxies.

The step requests a pause, a lease in the database. Each proxy that sees it sends nothing new to vLLM, and reports that
and its number of calls in flight. Once all have stopped, the servers are put to sleep. When the step ends, in any way,
the servers are woken and the pause is cleared. If this process dies, the pause expires and the proxies wake them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

from trainer.errors import DeviceBusy, LeaseLost
from whetstone.config.settings import Settings
from whetstone.domain.ids import new_id
from whetstone.vllm.client import Vllm, VllmDown, VllmError, VllmRefused

LOOK_EVERY_S = 0.05
RETRY_S = 30.0
"""How long a step waits that did not get the accelerator. Meanwhile the proxies send the requests that were waiting."""
LONGEST_RETRY_S = 1800.0
"""The wait doubles with each failure in a row, up to this: every try makes the apps wait."""
PATIENCE = 0.5
"""Share of `proxy.max_wait_s` that the step waits for calls in flight: the requests in the proxies wait as long."""

log = logging.getLogger(__name__)


class Table(Protocol):
    """The table in which the trainer requests the accelerator and the proxies report that they have stopped."""

    def ask(self, pause_id: str, now: datetime, lease_s: float) -> bool:
        """Request that the proxies stop; return False while another pause lasts."""

    def renew(self, pause_id: str, now: datetime, lease_s: float) -> bool:
        """Extend the pause to `lease_s` seconds from now; return False where it is over already."""

    def clear(self, pause_id: str) -> None:
        """End the pause."""

    def moving(self, pause_id: str, now: datetime) -> dict[str, str]:
        """Return the proxies that have not stopped yet, and why not."""


class Pause:
    """A step's pause. Without `vllm.shares_device` nothing pauses, and it does nothing."""

    def __init__(self, table: Table, servers: Iterable[Vllm], settings: Settings, step_id: str) -> None:
        self._table = table
        self._servers = list(servers)
        self._settings = settings
        self._id = f"{step_id} {new_id()}"  # unique, so that reports about an earlier try do not count for this one
        self._lasts = False
        self._drowsy: list[Vllm] = []
        """Servers that have been requested to sleep, and may be asleep."""

    def renew(self) -> None:
        """Renew the lease on the accelerator, where the step has it.

        Raises:
            LeaseLost: the pause is over: the servers are being woken.
        """
        if self._lasts and not self._table.renew(self._id, datetime.now(UTC), self._settings.trainer.lease_s):
            self._lasts = False
            raise LeaseLost(f"the accelerator was {self._settings.trainer.lease_s:g} s in silence and is vLLM's again")

    @contextmanager
    def hold(self, renew: Callable[[], None]) -> Iterator[None]:
        """Give the accelerator to the step within the context.

        `renew` renews the step's lease, and also calls `Pause.renew`.

        Raises:
            DeviceBusy: it is not available now; nothing sleeps or waits for it.
            LeaseLost: as `renew` raises it.
        """
        if not self._settings.vllm.shares_device:
            yield
            return
        self._await_able()
        if not self._table.ask(self._id, datetime.now(UTC), self._settings.trainer.lease_s):
            raise DeviceBusy("another step has the accelerator")
        self._lasts = True
        try:
            self._await_stopped(renew)
            self._sleep(renew)
            with self._renewing():
                yield
        finally:
            self._end()

    def _await_able(self) -> None:
        """Raise DeviceBusy before requesting a pause where the servers could not sleep anyway."""
        for server in self._servers:
            try:
                server.is_sleeping()
            except VllmRefused as error:
                raise DeviceBusy(_cannot_sleep(error)) from error
            except VllmDown as error:
                raise DeviceBusy(f"vLLM does not answer: {error}") from error

    @contextmanager
    def _renewing(self) -> Iterator[None]:
        """Renew the pause from a thread: loading a large model takes longer than a lease, without any callback."""
        over = threading.Event()
        keeping = threading.Thread(target=self._keep, args=(over,), name="pause", daemon=True)
        keeping.start()
        try:
            yield
        finally:
            over.set()
            keeping.join()

    def _keep(self, over: threading.Event) -> None:
        lease_s = self._settings.trainer.lease_s
        while not over.wait(lease_s / 3):
            try:
                if not self._table.renew(self._id, datetime.now(UTC), lease_s):
                    return  # over: the step notices when it renews
            except Exception as error:  # any error: the next try may be in time
                log.warning("the pause could not be renewed: %s", error)

    def _await_stopped(self, renew: Callable[[], None]) -> None:
        """Wait for calls in flight, but only for a part of the time that a request may wait in the proxy."""
        patience_s, lease_s = PATIENCE * self._settings.proxy.max_wait_s, self._settings.trainer.lease_s
        began_s = renewed_s = time.monotonic()
        while moving := self._table.moving(self._id, datetime.now(UTC)):
            now_s = time.monotonic()
            if now_s - began_s > patience_s:
                waiting_for = "; ".join(f"proxy {proxy}: {why}" for proxy, why in sorted(moving.items()))
                raise DeviceBusy(f"requests have not left the accelerator within {patience_s:g} s: {waiting_for}")
            if now_s - renewed_s > lease_s / 3:
                renew()
                renewed_s = now_s
            time.sleep(LOOK_EVERY_S)

    def _sleep(self, renew: Callable[[], None]) -> None:
        for server in self._servers:
            renew()
            self._drowsy.append(server)
            try:
                server.sleep(self._settings.trainer.lease_s / 2)
            except VllmRefused as error:
                self._drowsy.remove(server)
                raise DeviceBusy(_cannot_sleep(error)) from error
            except VllmDown as error:
                raise DeviceBusy(f"vLLM does not go to sleep: {error}") from error

    def _end(self) -> None:
        """Wake the servers, then clear the pause."""
        try:
            self.renew()
        except LeaseLost as error:
            log.warning("%s", error)
        if not self._lasts:
            return  # the proxies wake them, and another step may have the accelerator by now
        for server in self._drowsy:
            try:
                server.wake_up()
            except VllmError as error:
                log.error("vLLM is not woken, the proxies will try: %s", error)
        self._lasts = False
        self._table.clear(self._id)


def _cannot_sleep(error: VllmRefused) -> str:
    return (
        f"vLLM cannot sleep: {error}. One that `up` does not start needs --enable-sleep-mode and "
        "VLLM_SERVER_DEV_MODE=1; where its accelerator is its own, switch vllm.shares_device off"
    )
