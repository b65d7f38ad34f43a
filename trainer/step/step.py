"""Take one training step: claim, build rows, update, write the adapter, load it into vLLM, probe it, promote it.

Where the settings require more tests than the probe, `trainer.gate.controller` continues from there.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trainer.adapters import files
from trainer.adapters.published import bring
from trainer.domain.claims import Claim, Member
from trainer.domain.figures import step_columns
from trainer.domain.measured import versions_to_measure
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row
from trainer.domain.timing import Phases
from trainer.errors import (
    AdapterMismatch,
    DeviceBusy,
    LeaseLost,
    NotFinite,
    OutOfMemory,
    RowsDoNotFit,
    ServiceDown,
    ServiceRefused,
    TeacherUnusable,
)
from trainer.gate.answers import SteppedRows
from trainer.gate.candidate_probe import load_and_probe
from trainer.gate.probe import CandidateUnfit
from trainer.learner.engine import Engine
from trainer.learner.merged import in_bf16
from trainer.step import failed_rows
from trainer.step.distillation import scored_rows
from trainer.step.hindsight import corrected_rows
from trainer.step.learners import Learners
from trainer.step.preferred import preferred_rows
from trainer.step.replay import with_replay
from trainer.step.rewarded import rewarded
from trainer.step.supervised import imitation
from trainer.store.unit_of_work import Store
from trainer.vllm.device_pause import LONGEST_RETRY_S, RETRY_S, Pause
from trainer.vllm.pool import Replicas
from trainer.vllm.retry import retry_while_down
from whetstone.config.settings import Settings
from whetstone.config.trainer import BY_EXAMPLE, PREFERENCES, TrainerSettings
from whetstone.observability import log_setup, tracing
from whetstone.registry.adapters import AdapterDamaged, NotPublished, StoreError, remove
from whetstone.registry.remote.object_store import store_of

UNREADABLE_RETRY_S = 600.0
"""How long a step waits when its start version cannot be trained on; the version may be repaired or replaced meanwhile.
"""

ROWS_OF = {"sft": imitation, "hindsight": corrected_rows, "distill": scored_rows, "prefer": preferred_rows}
"""Kind of a step by example -> what makes its rows."""

log = logging.getLogger(__name__)


def take_step(policy: str, store: Store, learners: Learners, replicas: Replicas, settings: Settings) -> bool:
    """Take the policy's next step if one is due; return whether it was taken.

    Raises:
        LeaseLost: another worker has taken the step over; nothing more was written.
        VllmDown, StoreUnreachable: it did not come back in time; the step is taken over when its lease ends.
        AdapterError, ModelUnusable: the step cannot begin or its adapter cannot be written; it is taken over later.
    """
    claim = store.claim(policy, settings.trainer, settings.parts_learning_of(policy))
    if claim is None:
        return False
    attributes = {tracing.PROJECT: claim.project, "whetstone.policy": policy, "whetstone.step.id": claim.id}
    with (
        log_setup.about(project=claim.project, policy=policy, step=claim.number),
        tracing.span(
            "step", {**attributes, "whetstone.version.in": claim.name_in, "whetstone.version.out": claim.name_out}
        ),
    ):
        return _take_claimed(claim, store, learners, replicas, settings)


def _take_claimed(
    claim: Claim,
    store: Store,
    learners: Learners,
    replicas: Replicas,
    settings: Settings,
    unfit: frozenset[str] = frozenset(),
) -> bool:
    """Take the claimed step; return whether it is over.

    `unfit`: trajectories with rows that do not fit into the device's memory.
    """
    log.info("step %s: from version %d, %d compared with a baseline", claim.id, claim.version_in, claim.baselined)
    lease_s = settings.trainer.lease_s
    pause = Pause(store.pauses, replicas, settings, claim.id)

    def renew() -> None:
        store.renew(claim, lease_s)
        pause.renew()

    learners.renewed_by(partial(_renewing(renew, lease_s), 0, 0))
    phases = Phases(renew, learners.device, lease_s)
    rows: tuple[Row, ...] = ()
    try:
        with phases.phase("read"):
            predicts = claim.kind == "grpo" and settings.trainer.echo_weight > 0
            members = store.members(claim, settings.parts_learning_of(claim.policy), tools=predicts)
            _tell(members)
            taught = _read(claim, members, store, replicas, settings, unfit)
            rows = taught.rows
            if rows and settings.adapters.is_remote:
                _bring(claim, rows, store, settings)
        if not rows:
            return _nothing_to_learn(claim, taught, store, phases)
        reference = _reference(claim, store, settings.trainer)
        with phases.computing(), pause.hold(renew):
            with phases.phase("model"):
                learner = learners.take(claim)
            if learner.must_measure(rows):
                with phases.phase("measure"):
                    taught = _measure(claim, taught, learner, store, _renewing(renew, lease_s))
                    rows = taught.rows
                if not rows:
                    return _nothing_to_learn(claim, taught, store, phases)
            with phases.phase("train"):
                try:
                    both = (*rows, *taught.replay)
                    figures = learner.step(both, claim.version_in, _renewing(renew, lease_s), claim.kind, reference)
                except RowsDoNotFit:
                    learners.put_back(claim, learner)
                    raise
        learners.denied.pop(claim.policy, None)
    except RowsDoNotFit as error:
        log.warning("step %s begins again without some trajectories: %s", claim.id, error)
        del learner
        return _take_claimed(claim, store, learners, replicas, settings, unfit | error.trajectory_ids)
    except (DeviceBusy, OutOfMemory, ServiceDown) as busy:
        return _wait(claim, busy, store, learners)
    except (AdapterMismatch, AdapterDamaged, NotPublished) as error:
        return _unreadable(claim, str(error), store, learners, phases)
    except (TeacherUnusable, ServiceRefused) as error:
        store.end_without_version(claim, "failed", str(error), phases.columns())
        log.error("step %s: %s", claim.id, error)
        return True
    except NotFinite as error:
        why, path = _dump_rows(settings.data.resolve() / "kept", claim, rows, str(error))
        store.end_without_version(claim, "failed", why, {"kept": path, **phases.columns()})
        log.error("step %s: %s", claim.id, why)
        return True
    with phases.phase("write"):
        folder = settings.data.resolve() / "adapters" / claim.name_out
        manifest_sha256 = _write(folder, learner, claim, store, settings, renew)
    store.trained(claim, step_columns(figures, members, taught, claim.kind, settings.trainer), folder, manifest_sha256)
    try:
        # A backward pass takes about twice as long as a forward pass.
        stepped = SteppedRows(rows, figures.mismatch_k3, phases.seconds("train") / 3 / figures.read_tokens)
        probe = load_and_probe(replicas, claim, folder, learner, stepped, store, settings, phases)
    except ServiceDown as down:
        return _wait(claim, down, store, learners)
    except CandidateUnfit as unfit:
        store.reject(claim, str(unfit), unfit.probe, phases.columns(figures.sampled_tokens))
        log.warning("step %s: version %d rejected: %s", claim.id, claim.version_out, unfit)
        return True
    timing = phases.columns(figures.sampled_tokens)
    if settings.gate.waits_for:
        store.wait_for_tests(claim, timing, probe)
        log.info("step %s: version %d goes into its tests", claim.id, claim.version_out)
    elif why_not := store.promote(claim, timing, probe, settings.trainer.keep_served):
        log.warning("step %s: version %d rejected: %s", claim.id, claim.version_out, why_not)
    else:
        learners.keep(claim, learner)
        log.info("step %s: version %d is live after %.1f s", claim.id, claim.version_out, timing["seconds"])
    return True


def _wait(claim: Claim, why: Exception, store: Store, learners: Learners) -> bool:
    """Hand the step back for a while, longer each time. Return that it is not over."""
    retry_s = min(RETRY_S * 2 ** learners.denied[claim.policy], LONGEST_RETRY_S)
    learners.denied[claim.policy] += 1
    store.pauses.hand_back(claim, datetime.now(UTC), retry_s)
    log.warning("step %s waits %.0f s: %s", claim.id, retry_s, why)
    return False


def _write(
    folder: Path, learner: Engine, claim: Claim, store: Store, settings: Settings, renew: Callable[[], None]
) -> str:
    """Write the adapter, and publish it where there is an adapter store. Return its manifest's SHA-256.

    Raises:
        AdapterError: see `files.write`.
        StoreUnreachable: the store did not answer for as long as vLLM may take to start; nothing was left on the disk.
        LeaseLost: another worker has the step.
    """
    shelf = store_of(settings.adapters)
    if shelf is None:
        return files.write(folder, learner, parent=claim.version_in, step=claim.number)
    files.write(folder, learner, parent=claim.version_in, step=claim.number, in_bf16=in_bf16)
    try:
        return retry_while_down(partial(shelf.publish, folder, renew), claim, store, settings)
    except (StoreError, LeaseLost):
        remove(folder)
        raise


def _bring(claim: Claim, rows: Sequence[Row], store: Store, settings: Settings) -> None:
    """Have the adapters that the step reads on this machine: other machines' trainers may have written them.

    Raises:
        AdapterDamaged, NotPublished, NotCopied: an adapter cannot be had.
        StoreUnreachable: the store did not answer for as long as vLLM may take to start.
        LeaseLost: another worker has the step.
    """
    shelf = store_of(settings.adapters)
    if shelf is None:
        return
    measured = versions_to_measure(rows) if any(row.constrained for row in rows) else set()
    versions = {claim.version_in, _reference_version(claim, settings.trainer), *measured}
    for folder, manifest_sha256 in store.adapter_hashes(claim, versions).items():
        retry_while_down(partial(bring, shelf, folder, manifest_sha256), claim, store, settings)


def _nothing_to_learn(claim: Claim, taught: StepRows, store: Store, phases: Phases) -> bool:
    """End a step that has no row. Return that it is over."""
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(taught.left_out.values()).items()))
    by_example = "answer could be imitated" if claim.kind == "sft" else "answer could be learned from"
    what = by_example if claim.kind in BY_EXAMPLE else "trajectory could teach anything"
    why = f"no {what}: {why or 'there is none'}"
    store.end_without_version(claim, "noop", why, phases.columns())
    log.info("step %s: nothing to learn: %s", claim.id, why)
    return True


def _measure(
    claim: Claim, taught: StepRows, learner: Engine, store: Store, on_progress: Callable[[int, int], None]
) -> StepRows:
    """Return what the step trains on without the tokens that constraints decided, and record how many those are.

    Raises:
        LeaseLost: another worker has the step.
    """
    adapters = store.adapter_folders(claim, versions_to_measure(taught.rows) - {claim.version_in})
    measured = learner.measure(taught.rows, claim.version_in, adapters, on_progress)
    store.note_decided(claim, measured)
    log.info(
        "step %s: constraints decided %d of %d tokens; %d trajectories are left out; %d sampled tokens are outside of "
        "what the trainer finds to be allowed",
        claim.id, sum(measured.decided.values()), measured.tokens, len(measured.left_out), measured.disagreements,
    )  # fmt: skip
    return taught.without(measured)


def _tell(members: Sequence[Member]) -> None:
    """Log the step's groups and trajectories, so that a call can be traced to the step that trains on it."""
    groups = sorted({member.group_id for member in members})
    trajectories = [member.trajectory_id for member in members]
    with log_setup.about(groups=groups):
        log.info("takes %d groups with %d trajectories", len(groups), len(trajectories))
    tracing.tell({tracing.GROUPS: groups, tracing.TRAJECTORIES: trajectories})


def _unreadable(claim: Claim, why: str, store: Store, learners: Learners, phases: Phases) -> bool:
    """Handle a start version, or a reference, that cannot be read. Return whether the step is over.

    While that version is live, the step keeps its claim and waits; with another live version it could only be rejected.
    """
    if store.live_version(claim.policy) != claim.version_in:
        why = f"version {claim.version_in}, which it starts from, answers no longer and cannot be trained on: {why}"
        store.end_without_version(claim, "failed", why, phases.columns())
        log.error("step %s: %s", claim.id, why)
        return True
    store.pauses.hand_back(claim, datetime.now(UTC), UNREADABLE_RETRY_S)
    if claim.name_in not in learners.unreadable:
        learners.unreadable.add(claim.name_in)
        log.error("step %s waits: mend this, or promote another version: %s", claim.id, why)
    return False


def _read(
    claim: Claim,
    members: Sequence[Member],
    store: Store,
    replicas: Replicas,
    settings: Settings,
    unfit: frozenset[str],
) -> StepRows:
    """Return what the step trains on: its examples, or its trajectories with what their rewards say.

    Those of the trajectories `unfit` are left out.

    Raises:
        LeaseLost, VllmDown, ModelUnusable: see `take_step`.
    """
    if claim.wanted is not None:
        return ROWS_OF[claim.kind](claim, claim.wanted, store, replicas, settings, unfit)
    if settings.trainer.compares_parts:
        in_parts = sum(bool(member.parts) for member in members)
        log.info("step %s: the rewards of %d of %d trajectories have parts", claim.id, in_parts, len(members))
    taught = rewarded(claim.kind, members, settings.trainer, unfit)
    if tool_tokens := sum(end - start for row in taught.rows for start, end in row.tool_spans):
        log.info("step %s: %d tokens of tools are predicted", claim.id, tool_tokens)
    store.note_advantages(claim, taught.advantages, taught.left_out)
    return with_replay(claim, taught, store, replicas, settings, unfit)


def _reference(claim: Claim, store: Store, settings: TrainerSettings) -> Path | None:
    """Return the adapter that preferences are compared with, or a fixed teacher; None: the base model.

    Raises:
        AdapterMismatch: it is not there any more.
    """
    version = _reference_version(claim, settings)
    if version == 0:
        return None
    folder = store.adapter_folders(claim, {version}).get(version)
    if folder is None:
        raise AdapterMismatch(
            f"trainer.reference_version is version {version}, which has no adapter: choose one that has (0: the "
            "base model), and pin it"
        )
    return folder


def _reference_version(claim: Claim, settings: TrainerSettings) -> int:
    """Return the version that preferences are compared with, or a fixed teacher's; 0: the base model, or none."""
    by_teacher = claim.kind == "hindsight" and settings.hindsight_teacher == "reference"
    return settings.reference_version if claim.kind in PREFERENCES or by_teacher else 0


def _dump_rows(folder: Path, claim: Claim, rows: Sequence[Row], why: str) -> tuple[str, str | None]:
    """Save the rows of a failed step. Return the reason of the failure with their path, and the file or None."""
    if not rows:
        return why, None
    try:
        path = failed_rows.dump(folder, claim.id, rows)
    except OSError as error:
        return f"{why}; its rows could not be saved: {error.strerror or error}", None
    return f"{why}; its rows are saved in {path}", str(path)


def _renewing(renew: Callable[[], None], lease_s: float) -> Callable[[int, int], None]:
    """Return a progress callback that renews the lease, at most once per third of the lease."""
    renewed = time.monotonic()

    def on_progress(_done: int, _total: int) -> None:
        nonlocal renewed
        if time.monotonic() - renewed > lease_s / 3:
            renew()
            renewed = time.monotonic()

    return on_progress
