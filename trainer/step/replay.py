"""Build the rows that a step on rewards imitates beside its own: the best past attempts of the policy."""

import logging
import math
from collections.abc import Collection
from dataclasses import replace

from trainer.domain.claims import Claim
from trainer.domain.row_builder import StepRows
from trainer.step.supervised import example_rows
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings

log = logging.getLogger(__name__)


def with_replay(
    claim: Claim, taught: StepRows, store: Store, replicas: Replicas, settings: Settings, unfit: Collection[str] = ()
) -> StepRows:
    """Return the step's rows with those of past attempts: as many attempts as `trainer.replay_share` of the rows.

    They are chosen as by a supervised step on the best attempts, among those that no step will take any more. A step
    that is taken over has the same attempts. `unfit`: as in `imitation`.

    Raises:
        LeaseLost, VllmDown, VllmRefused, ModelUnusable: see `imitation`.
    """
    share = settings.trainer.replay_share
    if claim.kind != "grpo" or not share or not taught.rows:
        return taught
    store.take_replay(claim, math.ceil(share * len(taught.rows)))
    past = example_rows(claim, store, replicas, settings, unfit)
    log.info("step %s: %d rows of past attempts are imitated beside %d", claim.id, len(past.rows), len(taught.rows))
    return replace(taught, replay=tuple(replace(row, replayed=True) for row in past.rows))
