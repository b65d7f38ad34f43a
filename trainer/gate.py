"""Whether a new version may speak: into vLLM, a few prompts, what both say of the same tokens. Knows no table."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.claims import Claim, Probe
from trainer.figures import mean_k3
from trainer.learner.learner import Learner
from trainer.phases import Phases
from trainer.rows import Row
from trainer.store import Store
from whetstone.settings import Settings
from whetstone.vllm import Vllm, VllmDown, VllmRefused

PROBE_PROMPTS = 4
PROBE_TOKENS = 8
LOAD_RETRY_S = 1.0
NO_PROBE = Probe(None, 0)
NOT_LOADED = 404
"""What a server that was started again says of an adapter."""

log = logging.getLogger(__name__)


class NotFit(Exception):
    """The candidate does not pass the gate."""

    def __init__(self, reason: str, probe: Probe) -> None:
        super().__init__(reason)
        self.probe = probe


def passed(
    vllm: Vllm,
    claim: Claim,
    folder: Path,
    learner: Learner,
    rows: Sequence[Row],
    store: Store,
    settings: Settings,
    phases: Phases,
) -> Probe:
    """Load the candidate and probe it; once more if vLLM went away meanwhile, and with it what it had loaded.

    Raises:
        NotFit: the candidate is not to be served.
        VllmDown: it did not come back in time.
        LeaseLost: another worker has taken the step over.
    """
    again = False
    while True:
        with phases.phase("load"):
            _load(vllm, claim, folder, store, settings)
        store.loaded(claim)
        try:
            with phases.phase("probe"):
                return _probe(vllm, claim, learner, rows, settings.trainer.probe_max_k3)
        except VllmDown as error:
            if again:
                raise NotFit(f"vLLM goes away when it is to speak: {error}", NO_PROBE) from error
            log.warning("step %s: vLLM went away during the probe: %s", claim.id, error)
            again = True


def _load(vllm: Vllm, claim: Claim, folder: Path, store: Store, settings: Settings) -> None:
    """Load the candidate under its new name; wait for a vLLM that is away."""
    deadline = time.monotonic() + settings.vllm.start_timeout_s
    while True:
        try:
            if claim.name_out not in vllm.models():
                vllm.load(claim.name_out, folder)
            return
        except VllmRefused as error:
            if vllm.healthy():
                raise NotFit(f"vLLM does not load it: {error}", NO_PROBE) from error
            if time.monotonic() > deadline:
                raise VllmDown(f"vLLM is not well: {error}") from error
            store.renew(claim, settings.trainer.lease_s)
            time.sleep(LOAD_RETRY_S)
        except VllmDown:
            if time.monotonic() > deadline:
                raise
            store.renew(claim, settings.trainer.lease_s)
            time.sleep(LOAD_RETRY_S)


def _probe(vllm: Vllm, claim: Claim, learner: Learner, rows: Sequence[Row], max_k3: float) -> Probe:
    """Let vLLM speak with the candidate and compare with the trainer.

    Raises:
        NotFit: a logprob is not finite, or the two disagree: vLLM does not serve what was trained.
        VllmDown: it cannot be reached.
    """
    prompts = list(dict.fromkeys(row.token_ids_T[: row.sampled_T.index(True)] for row in rows))[:PROBE_PROMPTS]
    inference: list[float] = []
    trainer: list[float] = []
    for seed, prompt_ids in enumerate(prompts):
        try:
            sampled = vllm.sample(claim.name_out, prompt_ids, PROBE_TOKENS, seed)
        except VllmRefused as error:
            if error.status == NOT_LOADED or not vllm.healthy():
                raise VllmDown(f"it went away, and with it what it had loaded: {error}") from error
            raise NotFit(f"it does not answer: {error}", Probe(None, len(inference))) from error
        inference += sampled.logprobs
        trainer += learner.logprobs(prompt_ids, sampled.token_ids)
    k3 = mean_k3(inference, trainer)
    probe = Probe(k3, len(inference))
    if not math.isfinite(k3) or k3 > max_k3:
        raise NotFit(f"vLLM and trainer disagree: k3 {k3:.3g} nats a token, allowed are {max_k3:g}", probe)
    return probe
