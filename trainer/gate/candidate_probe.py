"""Load a new version into vLLM and probe it; retry once if vLLM is down meanwhile."""

import logging
from dataclasses import replace
from pathlib import Path

from trainer.domain.claims import Claim, Probe
from trainer.domain.timing import Phases
from trainer.gate.answers import SteppedRows
from trainer.gate.probe import CHATS, CandidateUnfit, run_probe
from trainer.gate.retention import run_retention
from trainer.learner.engine import Engine
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import LoadRefused, Replicas
from trainer.vllm.retry import retry_while_down
from whetstone.config.settings import Settings
from whetstone.vllm.client import Vllm, VllmDown

NO_PROBE = Probe(None, 0)

log = logging.getLogger(__name__)


def load_and_probe(
    replicas: Replicas,
    claim: Claim,
    folder: Path,
    learner: Engine,
    step: SteppedRows,
    store: Store,
    settings: Settings,
    phases: Phases,
) -> Probe:
    """Load the candidate and probe it.

    Raises:
        CandidateUnfit: the candidate must not be served.
        VllmDown: no server came back in time.
        LeaseLost: another worker has taken the step over.
    """
    adapters = {claim.name_out: folder}
    if claim.adapter_in is not None:  # a server that was just restarted lacks the parent as well
        adapters[claim.name_in] = claim.adapter_in
    chats = store.tool_chats(claim, CHATS)

    def probed(vllm: Vllm) -> Probe:
        probe = run_probe(vllm, claim, learner, step, chats, settings.gate, phases)
        if "retention" not in settings.gate.tests:
            return probe
        return replace(probe, retention=run_retention(vllm, claim, settings, phases.renew))

    again = False
    while True:
        with phases.phase("load"):
            try:
                loaded = retry_while_down(replicas.loading(adapters), claim, store, settings)
            except LoadRefused as error:
                raise CandidateUnfit(f"vLLM does not load it: {error}", NO_PROBE) from error
        store.loaded(claim)
        try:
            with phases.phase("probe"):
                probe = loaded.on.any(probed)
        except VllmDown as error:
            if again:
                raise CandidateUnfit(f"vLLM goes away when it is to speak: {error}", NO_PROBE) from error
            log.warning("step %s: vLLM went away during the probe: %s", claim.id, error)
            again = True
            continue
        servers = {"servers": len(replicas), "servers_without_it": len(loaded.missing)}
        remark = "; ".join(f"not loaded by {url}: {why}" for url, why in loaded.missing.items())
        probe = replace(probe, figures={**probe.figures, **servers}, remark=remark or None)
        if probe.retention is not None and probe.retention.decision == "reject":
            raise CandidateUnfit(probe.retention.reason, probe)
        return probe
