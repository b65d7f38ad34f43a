"""A step as its worker holds it: the claim, its members, what the probe said. Values only; knows no table."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.examples import Wanted
from trainer.rows import Spoken
from whetstone.ids import step_id, version_id
from whetstone.reasons import WhyNotTrained
from whetstone.training import Kind


@dataclass(frozen=True)
class Member:
    """One trajectory of a step."""

    trajectory_id: str
    group_id: str
    reward: float
    spoken: tuple[Spoken, ...]
    """Its trainable completions of the step's policy, in turn order."""
    silent: str | None = None
    """Why none of its completions can be trained on; None where one can."""
    seed: tuple[int, int] | None = None
    """Seed that the first of `spoken` was asked with, and which of the call's choices it is; None without a seed."""
    alone: bool = False
    """It is compared with its baseline, not with its group."""
    baseline: float | None = None
    """None where nothing was there to make one of, and where it is not alone."""


@dataclass(frozen=True)
class Held:
    """A step, and the fencing token of whoever may write to it."""

    project: str
    policy: str
    number: int
    attempt: int
    """The fencing token."""
    kind: Kind
    """grpo, or sft: it imitates examples instead of weighing trajectories."""
    version_in: int
    version_out: int

    @property
    def id(self) -> str:
        """The step's id."""
        return step_id(self.policy, self.number)

    @property
    def name_in(self) -> str:
        """The name of the version it starts from; also what vLLM calls it."""
        return version_id(self.policy, self.version_in)

    @property
    def name_out(self) -> str:
        """The name of the version it makes; also the adapter's in vLLM."""
        return version_id(self.policy, self.version_out)


@dataclass(frozen=True)
class Claim(Held):
    """A step that is ours until its lease ends."""

    adapter_in: Path | None
    """Folder of version_in's adapter; None for the base model."""
    created_at: datetime
    baselined: int
    """Of its trajectories, those compared with a running mean."""
    asked_at: datetime | None = None
    """When it was asked for by hand; None where it was due by itself."""
    wanted: Wanted | None = None
    """What a supervised step is to imitate."""


@dataclass(frozen=True)
class Tested(Held):
    """A step whose candidate is in the tests of the gate; whoever looks may go on with it."""

    state: str
    """The candidate's: candidate, unless somebody has promoted or rejected it by hand."""
    live_version: int
    tested_by: str | None
    """heldout | canary; None between two tests."""
    tested_since: datetime | None
    canary_share: float | None
    passed: frozenset[str]
    """Tests that it has passed."""


@dataclass(frozen=True)
class Probe:
    """What vLLM said with a new version, against the trainer's own reading of it and against its parent."""

    k3: float | None
    """Server against trainer: mean over its tokens, in nats; None where it was not measured."""
    tokens: int
    """How many vLLM sampled for it."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """All that was measured, as far as it is finite; docs/versions.md has the names."""
    remark: str | None = None
    """What is to be known beside the numbers."""


@dataclass(frozen=True)
class ToolChat:
    """A logged chat in which tools were offered."""

    messages: Sequence[Any]
    tools: Sequence[Any]


def why_silent(policy: str, completions: Iterable[tuple[str, str | None]]) -> str:
    """Why a trajectory of which no completion can be trained on is not: what most of them say, of equals the first.

    `completions` are policy and own reason of each, in turn order. One without a reason of its own lacks its token ids
    (rows of other programs and earlier versions). What other policies said counts only where this one said nothing.
    """
    told = list(completions)
    own = [reason or WhyNotTrained.NO_TOKEN_IDS for name, reason in told if name == policy]
    if own:
        return str(Counter(own).most_common(1)[0][0])
    return WhyNotTrained.OTHER_POLICY if told else WhyNotTrained.EMPTY
