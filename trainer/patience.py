"""Asking a vLLM that may be away for a while, with the lease kept meanwhile. Knows when to give up."""

import time
from collections.abc import Callable
from typing import TypeVar

from trainer.claims import Claim
from trainer.store import Store
from whetstone.settings import Settings
from whetstone.vllm import VllmDown

RETRY_S = 1.0

T = TypeVar("T")


def patiently(ask: Callable[[], T], claim: Claim, store: Store, settings: Settings) -> T:
    """What `ask` returns, once it does not raise VllmDown any more.

    Raises:
        VllmDown: it has for as long as vLLM may take to start.
        LeaseLost: another worker has taken the step over.
    """
    deadline = time.monotonic() + settings.vllm.start_timeout_s
    while True:
        try:
            return ask()
        except VllmDown:
            if time.monotonic() > deadline:
                raise
            store.renew(claim, settings.trainer.lease_s)
            time.sleep(RETRY_S)
