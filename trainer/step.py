"""One step, as a story: claim, rows, update, adapter on disk, into vLLM, probed, live. Knows the order of things."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trainer import adapter, kept
from trainer.claims import Claim, Member
from trainer.errors import NotFinite
from trainer.figures import told
from trainer.gate import NotFit, passed
from trainer.imitate import imitation
from trainer.learner.learner import Learner
from trainer.lessons import Lessons, lessons
from trainer.phases import Phases
from trainer.rows import Row
from trainer.store import Store
from whetstone.adapters import load_missing
from whetstone.settings import Settings
from whetstone.training import TrainerSettings
from whetstone.vllm import Vllm, VllmRefused

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
    phases = Phases(lambda: store.renew(claim, lease_s))
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
        probe = passed(vllm, claim, folder, learner, rows, store, settings, phases)
    except NotFit as unfit:
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
