"""The values that describe a step to its worker: the claim, its members, the probe's result."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.domain.advantages import Parts
from trainer.domain.examples.sft_examples import ExampleSelection
from trainer.domain.gate.verdict import Verdict
from trainer.domain.rows import SampledCompletion
from whetstone.config.trainer import Kind
from whetstone.domain.ids import step_id, version_id
from whetstone.domain.why_not_trained import WhyNotTrained


@dataclass(frozen=True)
class Member:
    """One trajectory of a step."""

    trajectory_id: str
    group_id: str
    reward: float
    completions: tuple[SampledCompletion, ...]
    """Its trainable completions of the step's policy, in turn order."""
    silent: str | None = None
    """Why none of its completions can be trained on; None where one can."""
    seed: tuple[int, int] | None = None
    """Seed of the request of the first of `spoken`, and which of the call's choices it is; None without a seed."""
    alone: bool = False
    """It is compared with its baseline, not with its group."""
    baseline: float | None = None
    """None where there was nothing to compute one from, and where it is not alone."""
    reward_scale: str | None = None
    """Its reward may be compared with those of other groups that name the same scale. None: only within its group."""
    cut_off: bool = False
    """A length limit ended its last completion."""
    judged: bool = False
    """A judge gave its reward."""
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    """What was earned at its turns, by turn; `reward` contains them."""
    parts: Parts = field(default_factory=dict)
    """The numbers that its reward was added up from; empty where they are not read, or do not add up to it."""

    def to_go(self, turn: int) -> float:
        """Return its return to go at a turn: its reward without what was earned before that turn."""
        return self.reward - math.fsum(reward for at, reward in self.step_rewards.items() if at < turn)


@dataclass(frozen=True)
class StepLease:
    """A step, and the fencing token of the worker that may write to it."""

    project: str
    policy: str
    number: int
    attempt: int
    """The fencing token."""
    kind: Kind
    """sft imitates examples and hindsight learns from words; the others learn from the rewards of trajectories."""
    version_in: int
    version_out: int

    @property
    def id(self) -> str:
        """The step's id."""
        return step_id(self.policy, self.number)

    @property
    def name_in(self) -> str:
        """The name of the version that the step starts from; vLLM uses it too."""
        return version_id(self.policy, self.version_in)

    @property
    def name_out(self) -> str:
        """The name of the version that the step makes; also the adapter's name in vLLM."""
        return version_id(self.policy, self.version_out)


@dataclass(frozen=True)
class Claim(StepLease):
    """A step that belongs to this worker until its lease ends."""

    adapter_in: Path | None
    """Folder of version_in's adapter; None for the base model."""
    created_at: datetime
    baselined: int
    """How many of its trajectories are compared with a running mean."""
    asked_at: datetime | None = None
    """When it was requested by hand; None where it was due by itself."""
    wanted: ExampleSelection | None = None
    """What a supervised step imitates."""


@dataclass(frozen=True)
class GateStep(StepLease):
    """A step whose candidate is being tested by the gate. Any worker may continue it."""

    state: str
    """The candidate's state: candidate, unless it was promoted or rejected by hand."""
    live_version: int
    tested_by: str | None
    """heldout | canary; None between two tests."""
    tested_since: datetime | None
    canary_share: float | None
    passed: frozenset[str]
    """Tests that it has passed."""


@dataclass(frozen=True)
class Probe:
    """The result of probing a version: its tokens in vLLM against the trainer's logprobs, and against its parent."""

    k3: float | None
    """k3 of server to trainer: mean over its tokens, in nats; None where it was not measured."""
    tokens: int
    """How many tokens vLLM sampled for the probe."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """All measured figures that are finite; docs/versions.md lists the names."""
    remark: str | None = None
    """A remark in addition to the numbers."""
    retention: Verdict | None = None
    """Whether it can still do what the base model can, where the settings want that tested."""


@dataclass(frozen=True)
class ToolChat:
    """A logged chat in which tools were offered."""

    messages: Sequence[Any]
    tools: Sequence[Any]


def why_silent(policy: str, completions: Iterable[tuple[str, str | None]]) -> str:
    """Return why a trajectory without trainable completions is not trained on: its most frequent reason.

    Of equally frequent reasons, the first counts.

    `completions` are (policy, own reason) pairs in turn order. A completion without a reason of its own lacks its token
    ids (rows of other programs and earlier versions). Completions of other policies count only where this policy has
    none.
    """
    pairs = list(completions)
    own = [reason or WhyNotTrained.NO_TOKEN_IDS for name, reason in pairs if name == policy]
    if own:
        return str(Counter(own).most_common(1)[0][0])
    return WhyNotTrained.OTHER_POLICY if pairs else WhyNotTrained.EMPTY
