"""The trainer's SQL: claim a step, read its completions, advance states. Only this folder knows the tables.

Every write of a step carries the claim's attempt number (a fencing token): a worker whose lease was taken over writes
nothing more.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, case, select

from migrations import schema
from trainer.domain.claims import Claim, Member, Probe, ToolChat
from trainer.domain.examples.corrections import CorrectedAnswer
from trainer.domain.examples.own_answers import OwnAnswer
from trainer.domain.examples.sft_examples import Example, ExampleSelection, RenderedExample
from trainer.domain.figures import EndedStep
from trainer.domain.measured import MeasuredRows
from trainer.store.claims import Claims
from trainer.store.eligible_groups import policy_names, read_lineage
from trainer.store.examples.answers import read_examples, take, write_rendered
from trainer.store.examples.corrections import find_corrections, read_corrections
from trainer.store.examples.own_answers import find_own_answers, read_own_answers
from trainer.store.examples.pairs import find_pairs, read_pairs
from trainer.store.examples.sources import Source, find
from trainer.store.gate import note_probe, promoted, read_tool_chats, rejected, wait_for_tests
from trainer.store.members import read_members
from trainer.store.pause import PauseStore
from trainer.store.step_ends import end_step, last_ended, update_step
from whetstone.config.rewards import RewardSettings
from whetstone.config.trainer import BEST, TrainerSettings
from whetstone.database.engine import chunks
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.registry.versions import live_version

COUNTS_PER_STATEMENT = 1_000
"""Completions whose counts of decided tokens one statement writes; each takes two parameters and part of a CASE."""

FindAnswers = Callable[[Connection, Claim, ExampleSelection, Collection[int]], Sequence[Source]]
"""Selects answers that some versions of the policy sampled."""


class Store:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str, home: str | None = None) -> None:
        """`home`: the project that the servers and their pauses belong to; default: this project."""
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self.pauses = PauseStore(engine, home or project)
        """Pauses of an accelerator that vLLM shares with the trainer."""

    def policies(self) -> set[str]:
        """Return the project's policies."""
        with self._reader.connect() as connection:
            return set(policy_names(connection, self._project))

    def claim(self, policy: str, settings: TrainerSettings, learning: RewardSettings | None = None) -> Claim | None:
        """Claim the policy's next step: one whose worker stopped responding, else a new one if one is due.

        Also discards groups that have become too stale. `learning`: the policy's reward settings, by whose weights the
        parts of rewards add up; None: parts do not count.
        """
        with self._engine.begin() as connection:
            return Claims(connection, self._project, settings, datetime.now(UTC), learning).next(policy)

    def why_due(self, policy: str, settings: TrainerSettings, learning: RewardSettings | None = None) -> str | None:
        """Return why `claim` would claim a step of the policy now; None if it would claim none.

        Also discards groups, as `claim` does. `learning`: as there.
        """
        with self._engine.begin() as connection:
            return Claims(connection, self._project, settings, datetime.now(UTC), learning).why_due(policy)

    def members(self, claim: Claim, learning: RewardSettings | None = None, *, tools: bool = False) -> list[Member]:
        """Return the completions of the step's trajectories, with whole prompts, in a fixed order.

        `learning` is as in `claim`. `tools`: with the number of tokens that tools gave before each.
        """
        with self._reader.connect() as connection:
            return read_members(connection, claim, learning, tools=tools)

    def take_examples(self, claim: Claim, wanted: ExampleSelection) -> None:
        """Take the examples that a supervised step imitates, unless it has them already.

        Raises:
            LeaseLost: another worker has the step.
        """
        self._take(claim, wanted, find)

    def take_replay(self, claim: Claim, count: int) -> None:
        """Take past attempts that a step on rewards imitates beside its own, unless it has some already.

        Raises:
            LeaseLost: another worker has the step.
        """
        self._take(claim, ExampleSelection(BEST, None, count), partial(find, past=True))

    def take_corrections(self, claim: Claim, wanted: ExampleSelection, max_staleness: int) -> None:
        """Take the answers that words correct, unless it has them already.

        Those of versions that are more than `max_staleness` updates older than the one the step starts from are left.

        Raises:
            LeaseLost: another worker has the step.
        """
        self._take_answers(find_corrections, claim, wanted, max_staleness)

    def corrections(self, claim: Claim) -> list[CorrectedAnswer]:
        """Return the answers that words correct, in a fixed order."""
        with self._reader.connect() as connection:
            return read_corrections(connection, claim)

    def take_own_answers(self, claim: Claim, wanted: ExampleSelection, max_staleness: int) -> None:
        """Take the policy's answers that a teacher is to score, unless it has them already; versions as above.

        Raises:
            LeaseLost: another worker has the step.
        """
        self._take_answers(find_own_answers, claim, wanted, max_staleness)

    def own_answers(self, claim: Claim) -> list[OwnAnswer]:
        """Return the policy's answers that a teacher is to score, in a fixed order."""
        with self._reader.connect() as connection:
            return read_own_answers(connection, claim)

    def _take_answers(self, find: FindAnswers, claim: Claim, wanted: ExampleSelection, max_staleness: int) -> None:
        """Take the answers of recent versions that `find` returns."""
        with self._reader.connect() as connection:
            lineage = read_lineage(connection, claim.project, claim.policy, claim.version_in)
            sources = find(connection, claim, wanted, lineage[: max_staleness + 1])
        with self._engine.begin() as connection:
            take(connection, claim, wanted, sources, datetime.now(UTC))

    def take_pairs(self, claim: Claim, wanted: ExampleSelection) -> None:
        """Take the pairs of which the step prefers the better answer, unless it has them already.

        Raises:
            LeaseLost: another worker has the step.
        """
        self._take(claim, wanted, find_pairs)

    def pairs(self, claim: Claim) -> list[tuple[str, str]]:
        """Return the better and the worse trajectory of each of the step's pairs, in a fixed order."""
        with self._reader.connect() as connection:
            return read_pairs(connection, claim)

    def _take(
        self,
        claim: Claim,
        wanted: ExampleSelection,
        find: Callable[[Connection, Claim, ExampleSelection], list[Source]],
    ) -> None:
        with self._reader.connect() as connection:
            sources = find(connection, claim, wanted)
        with self._engine.begin() as connection:
            take(connection, claim, wanted, sources, datetime.now(UTC))

    def examples(self, claim: Claim) -> list[Example]:
        """Return the step's answers to imitate, or those of its pairs, in a fixed order."""
        with self._reader.connect() as connection:
            return read_examples(connection, claim)

    def rendered(self, claim: Claim, done: Iterable[RenderedExample]) -> None:
        """Record the rendered ids of its examples, or why there are none.

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            write_rendered(connection, claim, done)

    def ended(self, policy: str) -> EndedStep | None:
        """Return the last of the policy's steps that is over; None before the first."""
        with self._reader.connect() as connection:
            return last_ended(connection, self._project, policy)

    def live_version(self, policy: str) -> int:
        """Return the live version."""
        with self._reader.connect() as connection:
            return live_version(connection, self._project, policy)

    def renew(self, claim: Claim, lease_s: float) -> None:
        """Extend the step's lease to `lease_s` seconds from now.

        Raises:
            LeaseLost: another worker has it.
        """
        with self._engine.begin() as connection:
            update_step(connection, claim, lease_until=datetime.now(UTC) + timedelta(seconds=lease_s))

    def trained(self, claim: Claim, figures: dict[str, Any], folder: Path, manifest_sha256: str) -> None:
        """Make the version of the written adapter the candidate.

        Raises:
            LeaseLost: another worker has the step.
        """
        version = {
            "project": claim.project,
            "id": claim.name_out,
            "policy": claim.policy,
            "version": claim.version_out,
            "parent": claim.version_in,
            "state": "candidate",
            "step": claim.number,
            "adapter_path": str(folder),
            "manifest_sha256": manifest_sha256,
            "served": True,
            "created_at": datetime.now(UTC),
        }
        with self._engine.begin() as connection:
            update_step(connection, claim, state="trained", version_out=claim.version_out, **figures)
            connection.execute(schema.policy_versions.insert().values(**version))

    def loaded(self, claim: Claim) -> None:
        """Record that vLLM has loaded the candidate.

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            update_step(connection, claim, state="loaded")

    def tool_chats(self, claim: Claim, most: int) -> list[ToolChat]:
        """Return at most `most` of the step's chats in which tools were offered."""
        with self._reader.connect() as connection:
            return read_tool_chats(connection, claim, most)

    def promote(self, claim: Claim, figures: Mapping[str, Any], probe: Probe, keep_served: int) -> str | None:
        """Promote a candidate that passed the probe, in one transaction with all that follows.

        Return why it was rejected instead; None where it was promoted.

        Raises:
            LeaseLost: another worker has the step.
        """
        now = datetime.now(UTC)
        with self._engine.begin() as connection:
            note_probe(connection, claim, probe, "pass", probe.remark, now)
            return promoted(connection, claim, keep_served, figures, now)

    def wait_for_tests(self, claim: Claim, figures: Mapping[str, Any], probe: Probe) -> None:
        """Send a candidate that passed the probe into the tests of the gate.

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            note_probe(connection, claim, probe, "pass", probe.remark, datetime.now(UTC))
            wait_for_tests(connection, claim, figures)

    def reject(self, claim: Claim, reason: str, probe: Probe, figures: Mapping[str, Any]) -> None:
        """Reject a candidate that failed the probe, or `retention` after it.

        Its trajectories count as trained, so that none is trained on twice.

        Raises:
            LeaseLost: another worker has the step.
        """
        now = datetime.now(UTC)
        with self._engine.begin() as connection:
            by_retention = probe.retention is not None
            decision, why = ("pass", probe.remark) if by_retention else ("reject", reason)
            note_probe(connection, claim, probe, decision, why, now)
            rejected(connection, claim, reason, figures, now)

    def end_without_version(self, claim: Claim, state: str, reason: str, figures: Mapping[str, Any]) -> None:
        """End a step that made no version: `noop` (nothing to learn) or `failed` (an error).

        Raises:
            LeaseLost: another worker has the step.
        """
        with self._engine.begin() as connection:
            end_step(connection, claim, state, datetime.now(UTC), {"error": reason, **figures})

    def note_advantages(self, claim: Claim, by_trajectory: Mapping[str, float], left_out: Mapping[str, str]) -> None:
        """Record each trajectory's advantage, or why it teaches nothing (`left_out`: id -> reason).

        It replaces what an earlier try of the step recorded.

        Raises:
            LeaseLost: another worker has the step.
        """
        s, t = schema.step_trajectories.c, schema.trajectories.c
        with self._engine.begin() as connection:
            update_step(connection, claim)
            if by_trajectory:
                is_taught = (s.project == claim.project, s.step_id == claim.id, s.trajectory_id == bindparam("its_id"))
                taught = schema.step_trajectories.update().where(*is_taught)
                taught_rows = [{"its_id": one, "its_advantage": advantage} for one, advantage in by_trajectory.items()]
                connection.execute(taught.values(advantage=bindparam("its_advantage")), taught_rows)
            if left_out:
                is_left_out = (t.project == claim.project, t.id == bindparam("its_id"))
                left = schema.trajectories.update().where(*is_left_out)
                left_rows = [{"its_id": one, "its_reason": str(reason)} for one, reason in left_out.items()]
                connection.execute(left.values(why_not_trained=bindparam("its_reason")), left_rows)
            for some in chunks(left_out):
                weightless = (s.project == claim.project, s.step_id == claim.id, s.trajectory_id.in_(some))
                connection.execute(schema.step_trajectories.update().where(*weightless).values(advantage=None))

    def adapter_folders(self, claim: Claim, versions: Collection[int]) -> dict[int, Path | None]:
        """Return the adapters of those of the policy's versions that have not been removed; None for the base model."""
        v = schema.policy_versions.c
        query = select(v.version, v.adapter_path).where(
            v.project == claim.project, v.policy == claim.policy, v.version.in_(versions), v.removed_at.is_(None)
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
        return {row.version: None if row.adapter_path is None else Path(row.adapter_path) for row in rows}

    def adapter_hashes(self, claim: Claim, versions: Collection[int]) -> dict[Path, str | None]:
        """Return the folders of those of the policy's versions that have an adapter, with the manifests' hashes."""
        v = schema.policy_versions.c
        query = select(v.adapter_path, v.manifest_sha256).where(
            v.project == claim.project, v.policy == claim.policy, v.version.in_(versions),
            v.removed_at.is_(None), v.adapter_path.is_not(None),
        )  # fmt: skip
        with self._reader.connect() as connection:
            return {Path(row.adapter_path): row.manifest_sha256 for row in connection.execute(query)}

    def note_decided(self, claim: Claim, measured: MeasuredRows) -> None:
        """Record how many tokens of each completion, and which share of the step's, constraints decided.

        Trajectories of which nothing can be trained are `constrained`, and count as not trained on.

        Raises:
            LeaseLost: another worker has the step.
        """
        c, s, t = schema.completions.c, schema.step_trajectories.c, schema.trajectories.c
        decided, disagreements = measured.decided, measured.disagreements
        with self._engine.begin() as connection:
            share = measured.decided_share
            update_step(connection, claim, decided_share=share, support_disagreements=disagreements)
            for some in chunks(decided, COUNTS_PER_STATEMENT):
                counts = case({name: decided[name] for name in some}, value=c.id)
                of_step = (c.project == claim.project, c.id.in_(some))
                connection.execute(schema.completions.update().where(*of_step).values(decided_tokens=counts))
            for some in chunks(measured.left_out):
                taken = (s.project == claim.project, s.step_id == claim.id, s.trajectory_id.in_(some))
                connection.execute(schema.step_trajectories.update().where(*taken).values(advantage=None))
                left = (t.project == claim.project, t.id.in_(some))
                reason = WhyNotTrained.CONSTRAINED.value
                connection.execute(schema.trajectories.update().where(*left).values(why_not_trained=reason))
