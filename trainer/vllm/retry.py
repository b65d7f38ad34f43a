"""Retry a call to a vLLM, or an adapter store, that may be down for a while, and renew the lease meanwhile."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from trainer.domain.claims import Claim
from trainer.store.unit_of_work import Store
from whetstone.config.settings import Settings
from whetstone.registry.adapters import StoreUnreachable
from whetstone.vllm.client import VllmDown

RETRY_S = 1.0

T = TypeVar("T")

log = logging.getLogger(__name__)


def retry_while_down(ask: Callable[[], T], claim: Claim, store: Store, settings: Settings) -> T:
    """Call `ask` until it raises neither VllmDown nor StoreUnreachable any more, and return its result.

    Raises:
        VllmDown, StoreUnreachable: it was down for as long as vLLM may take to start.
        LeaseLost: another worker has taken the step over.
    """
    deadline = time.monotonic() + settings.vllm.start_timeout_s
    while True:
        try:
            return ask()
        except (VllmDown, StoreUnreachable) as error:
            if time.monotonic() > deadline:
                raise
            if isinstance(error, StoreUnreachable):
                log.warning("step %s waits for the adapter store: %s", claim.id, error)
            store.renew(claim, settings.trainer.lease_s)
            time.sleep(RETRY_S)
