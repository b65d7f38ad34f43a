"""One sweep of the training worker: what it does for each policy, and in which order. Knows no Celery and no table."""

import logging
from collections.abc import Callable, Sequence

from sqlalchemy.exc import DBAPIError

from trainer.errors import LeaseLost
from whetstone.vllm import VllmError

log = logging.getLogger(__name__)


def rounds(
    policies: Sequence[str],
    go_on: Callable[[str], object],
    tidy: Callable[[], object],
    take: Callable[[str], bool],
) -> None:
    """Go on with tests, remove what is old, take one step of each policy; again while any step was taken.

    So a policy whose steps never end keeps neither the others nor its own tests waiting. What goes wrong with one
    policy does not keep the others from their turn.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away.
    """
    taken = [True]
    while any(taken):
        for policy in policies:
            _guarded(policy, go_on)
        tidy()
        taken = [_guarded(policy, take) for policy in policies]


def _guarded(policy: str, act: Callable[[str], object]) -> bool:
    try:
        return bool(act(policy))
    except (VllmError, LeaseLost) as error:
        log.warning("%s: %s", policy, error)
    except DBAPIError:
        raise
    except Exception:  # whatever it is: a claimed step is tried again when its lease ends, and given up in the end
        log.exception("%s: the step could not be taken", policy)
    return False
