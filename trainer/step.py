"""One step, as a story: claim, rows, update, adapter on disk, into vLLM, probed, live. Knows the order of things."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trainer import adapter, kept
from trainer.claims import Claim, Member, Probe
from trainer.errors import NotFinite
from trainer.figures import mean_k3, timed, told
from trainer.imitate import imitation
from trainer.learner.learner import Learner
from trainer.lessons import Lessons, lessons
from trainer.rows import Row
from trainer.store import Store
from whetstone.adapters import load_missing
from whetstone.settings import Settings
from whetstone.training import TrainerSettings
from whetstone.vllm import Vllm, VllmDown, VllmRefused

PROBE_PROMPTS = 4
PROBE_TOKENS = 8
LOAD_RETRY_S = 1.0
NO_PROBE = Probe(None, 0)

log = logging.getLogger(__name__)


class Makes(Protocol):
    """Who makes learners: the class `Learner`, or the leader of several processes."""

    def fresh(self, model_path: str, settings: TrainerSettings, seed: int, /) -> Learner:
        """A learner of version 0."""

    def resume(self, model_path: str, adapter_folder: Path, settings: TrainerSettings, /) -> Learner:
        """The learner that wrote the folder."""


class Learners:
    """The learner of each policy, kept warm between steps; read from the adapter's folder where it is not."""

    def __init__(self, settings: Settings, makes: Makes = Learner) -> None:
        self.makes = makes
        self._settings = settings
        self._warm: dict[str, tuple[int, Learner]] = {}

    def take(self, claim: Claim) -> Learner:
        """The learner at the claim's version_in. It is the step's until `keep` gives it back."""
        warm = self._warm.pop(claim.policy, None)
        if warm is not None and warm[0] == claim.version_in:
            return warm[1]
        del warm  # its memory is needed for the one that is read now
        settings = self._settings
        if claim.adapter_in is None:
            return self.makes.fresh(settings.model, settings.trainer, settings.seed)
        return self.makes.resume(settings.model, claim.adapter_in, settings.trainer)

    def keep(self, claim: Claim, learner: Learner) -> None:
        """Keep a learner that made the now live version."""
        self._warm[claim.policy] = (claim.version_out, learner)


class _Phases:
    """Seconds by phase; each begins with a whole lease."""

    def __init__(self, renew: Callable[[], None]) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._renew = renew

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._renew()
        try:
            yield
        finally:
            self._seconds[name] = round(self._seconds.get(name, 0.0) + time.perf_counter() - began, 4)

    def told(self, sampled_tokens: int = 0) -> dict[str, Any]:
        """The step's time up to here, by column."""
        return timed(time.perf_counter() - self._began, self._seconds, sampled_tokens)


class _NotFit(Exception):
    """The candidate does not pass the gate."""

    def __init__(self, reason: str, probe: Probe) -> None:
        super().__init__(reason)
        self.probe = probe


def take_step(policy: str, store: Store, learners: Learners, vllm: Vllm, settings: Settings) -> bool:
    """Take the policy's next step if one is due; whether it did.

    Raises:
        LeaseLost: another worker has taken the step over; nothing more was written.
        VllmDown: it did not come back in time; the step is taken over when its lease ends.
        AdapterError, AdapterDamaged, ModelUnusable: the step cannot begin or its adapter cannot be written; likewise.
    """
    claim = store.claim(policy, settings.trainer)
    if claim is None:
        return False
    log.info("step %s: from version %d, %d compared with a baseline", claim.id, claim.version_in, claim.baselined)
    lease_s = settings.trainer.lease_s
    phases = _Phases(lambda: store.renew(claim, lease_s))
    rows: tuple[Row, ...] = ()
    try:
        with phases.phase("read"):
            members = store.members(claim)
            taught = _read(claim, members, store, vllm, settings)
            rows = taught.rows
        if not rows:
            why = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(taught.left_out.values()).items()))
            what = "trajectory could teach anything" if claim.wanted is None else "answer could be imitated"
            why = f"no {what}: {why or 'there is none'}"
            store.end_without_version(claim, "noop", why, phases.told())
            log.info("step %s: nothing to learn: %s", claim.id, why)
            return True
        with phases.phase("model"):
            learner = learners.take(claim)
        with phases.phase("train"):
            figures = learner.step(rows, claim.version_in, _renewing(store, claim, lease_s), claim.kind)
    except NotFinite as error:
        why, path = _kept(settings.data.resolve() / "kept", claim, rows, str(error))
        store.end_without_version(claim, "failed", why, {"kept": path, **phases.told()})
        log.error("step %s: %s", claim.id, why)
        return True
    with phases.phase("write"):
        folder = settings.data.resolve() / "adapters" / claim.name_out
        manifest_sha256 = adapter.write(folder, learner, parent=claim.version_in, step=claim.number)
    store.trained(claim, told(figures, members, taught, claim.kind, settings.trainer), folder, manifest_sha256)
    try:
        probe = _gate(vllm, claim, folder, learner, rows, store, settings, phases)
    except _NotFit as unfit:
        store.reject(claim, str(unfit), unfit.probe, phases.told(figures.sampled_tokens))
        log.warning("step %s: version %d rejected: %s", claim.id, claim.version_out, unfit)
        return True
    timing = phases.told(figures.sampled_tokens)
    store.promote(claim, timing, probe, settings.trainer.keep_served)
    learners.keep(claim, learner)
    log.info("step %s: version %d is live after %.1f s", claim.id, claim.version_out, timing["seconds"])
    return True


def reconcile(store: Store, vllm: Vllm) -> None:
    """Bring vLLM to what the database says: load what is missing (after a restart of it too), unload what is over.

    Raises:
        VllmDown: it cannot be reached.
        VllmRefused: it does not list what it has.
    """
    # In this order: what another worker loads after the first look was wanted before.
    loaded = vllm.models()
    wanted = store.served()
    load_missing(vllm, wanted, loaded)
    policies = store.policies()
    for name in loaded - wanted.keys():
        policy, _, version = name.rpartition("@v")
        if policy in policies and version != "0":
            try:
                vllm.unload(name)
                log.info("unloaded %s", name)
            except VllmRefused as error:
                log.warning("%s cannot be unloaded: %s", name, error)


def _read(claim: Claim, members: Sequence[Member], store: Store, vllm: Vllm, settings: Settings) -> Lessons:
    """What the step teaches: its examples, else its trajectories by what they were worth.

    Raises:
        LeaseLost, VllmDown, ModelUnusable: as `take_step` has them.
    """
    if claim.wanted is not None:
        return imitation(claim, claim.wanted, store, vllm, settings)
    taught = lessons(members, settings.trainer.max_row_tokens, settings.trainer.advantage_scale)
    store.note_advantages(claim, taught.advantages, taught.left_out)
    return taught


def _kept(folder: Path, claim: Claim, rows: Sequence[Row], why: str) -> tuple[str, str | None]:
    """Keep the rows of a step that fails. Returns why it does, with where they are, and the file; None without one."""
    if not rows:
        return why, None
    try:
        path = kept.keep(folder, claim.id, rows)
    except OSError as error:
        return f"{why}; its rows could not be kept: {error.strerror or error}", None
    return f"{why}; its rows are kept in {path}", str(path)


def _renewing(store: Store, claim: Claim, lease_s: float) -> Callable[[int, int], None]:
    """Renew the lease as the step goes on, at most every third of it."""
    renewed = time.monotonic()

    def on_progress(_done: int, _total: int) -> None:
        nonlocal renewed
        if time.monotonic() - renewed > lease_s / 3:
            store.renew(claim, lease_s)
            renewed = time.monotonic()

    return on_progress


def _gate(
    vllm: Vllm,
    claim: Claim,
    folder: Path,
    learner: Learner,
    rows: Sequence[Row],
    store: Store,
    settings: Settings,
    phases: _Phases,
) -> Probe:
    """Load the candidate and probe it; once more if vLLM went away meanwhile, and with it what it had loaded.

    Raises:
        _NotFit: the candidate is not to be served.
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
                raise _NotFit(f"vLLM goes away when it is to speak: {error}", NO_PROBE) from error
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
            raise _NotFit(f"vLLM does not load it: {error}", NO_PROBE) from error
        except VllmDown:
            if time.monotonic() > deadline:
                raise
            store.renew(claim, settings.trainer.lease_s)
            time.sleep(LOAD_RETRY_S)


def _probe(vllm: Vllm, claim: Claim, learner: Learner, rows: Sequence[Row], max_k3: float) -> Probe:
    """Let vLLM speak with the candidate and compare with the trainer.

    Raises:
        _NotFit: a logprob is not finite, or the two disagree: vLLM does not serve what was trained.
        VllmDown: it cannot be reached.
    """
    prompts = list(dict.fromkeys(row.token_ids_T[: row.sampled_T.index(True)] for row in rows))[:PROBE_PROMPTS]
    inference: list[float] = []
    trainer: list[float] = []
    for seed, prompt_ids in enumerate(prompts):
        try:
            sampled = vllm.sample(claim.name_out, prompt_ids, PROBE_TOKENS, seed)
        except VllmRefused as error:
            raise _NotFit(f"it does not answer: {error}", Probe(None, len(inference))) from error
        inference += sampled.logprobs
        trainer += learner.logprobs(prompt_ids, sampled.token_ids)
    k3 = mean_k3(inference, trainer)
    probe = Probe(k3, len(inference))
    if not math.isfinite(k3) or k3 > max_k3:
        raise _NotFit(f"vLLM and trainer disagree: k3 {k3:.3g} nats a token, allowed are {max_k3:g}", probe)
    return probe
