"""Run one sweep of the training worker: what it does for each policy, and in which order."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from trainer.errors import LeaseLost
from whetstone.registry.adapters import StoreError
from whetstone.vllm.client import VllmError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def rounds(
    policies: Sequence[str],
    go_on: Callable[[str], object],
    tidy: Callable[[], object],
    take: Callable[[str], bool],
    at_once: int = 1,
) -> bool:
    """Continue tests, remove old adapters, take one step of each policy; repeat while any step was taken.

    So a policy that always has a next step delays neither the other policies nor its own tests. An error in one policy
    does not stop the others. `at_once`: policies whose steps are taken at the same time, each in a thread.

    Returns:
        Whether any step was taken.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable.
    """
    took_any, taken = False, list[bool | None]([True])
    while any(taken):
        for policy in policies:
            guarded(policy, go_on)
        tidy()
        if at_once == 1:
            taken = [guarded(policy, take) for policy in policies]
        else:
            with ThreadPoolExecutor(at_once, thread_name_prefix="step") as threads:
                taken = list(threads.map(partial(guarded, act=take), policies))
        took_any |= any(taken)
    return took_any


def guarded(policy: str, act: Callable[[str], Result]) -> Result | None:
    """Return what `act` returns; log its error, if it has one, and return None.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable.
    """
    try:
        return act(policy)
    except (VllmError, StoreError, LeaseLost) as error:
        log.warning("%s: %s", policy, error)
    except DBAPIError:
        raise
    except Exception:  # any error: a claimed step is retried when its lease ends, and fails after its last attempt
        log.exception("%s: the step could not be taken", policy)
    return None
