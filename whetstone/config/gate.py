"""Settings of the tests that a candidate must pass before it goes live, and of the automatic rollback."""

from typing import Literal

from pydantic import Field

from whetstone.config.rewards import Section

SweptTest = Literal["heldout", "canary"]
"""Tests that need traffic or rewards: a candidate waits for them."""
GateTest = SweptTest | Literal["retention"]


class GateSettings(Section):
    """How a candidate is tested; docs/versions.md describes the tests and what they can detect."""

    tests: tuple[GateTest, ...] = ()
    """Tests that run after the probe, in this order: `heldout` replays logged prompts of the eval split, `canary` gives
    the candidate a share of the live traffic. The next step waits until they are over. `retention`, before both, asks
    fixed prompts that the base model can answer, with the probe."""
    max_k3: float | None = Field(None, gt=0)
    """Probe: largest mean k3 between vLLM's and the trainer's logprobs under the new adapter, in nats a token. Unset:
    four times the parent's own k3, at least 0.001 and at most 0.1; and what vLLM serves of the adapter's effect must
    not be off by a quarter and four standard errors."""
    probe_share: float = Field(0.2, gt=0, lt=1)
    """Probe: share of the step's time that it may take, as a rule. Where the server samples slowly, it is given fewer
    tokens, 128 at the least."""
    max_parent_kl: float = Field(2.0, gt=0)
    """Probe: largest mean k3 from the parent to the candidate, in nats a token of the parent's."""
    max_length_ratio: float = Field(8.0, gt=1)
    """Probe: how many times longer, or shorter, than the parent's answers the candidate's answers may be on average."""
    max_parse_loss: float = Field(0.5, ge=0, le=1)
    """Probe: by how much the share of answers with parsable tool calls may fall below the parent's."""
    smallest_loss: float = Field(0.05, gt=0)
    """The drop in mean reward that the tests must detect, in units of the reward."""
    error_rate: float = Field(0.05, gt=0, lt=0.5)
    """How often each test may reject a candidate that is no worse."""
    power: float = Field(0.8, gt=0.5, lt=1)
    """How often `canary`, and the watch after promotion, must detect a candidate that is worse by `smallest_loss`."""
    heldout_prompts: int = Field(256, ge=16)
    """Most prompts of the eval split that `heldout` replays; the newest come first."""
    heldout_minimum: int = Field(16, ge=8)
    """Fewest prompts that `heldout` needs for a decision; with fewer, the candidate is rejected."""
    retention_loss: float = Field(0.1, gt=0, lt=1)
    """`retention` ends early where it is ruled out, with probability `power`, that the candidate answers this share of
    the fixed prompts less often right than the base model."""
    canary_share: float = Field(0.1, gt=0, le=0.5)
    """Share of new trajectories that the candidate answers during `canary`."""
    deadline_s: float = Field(24 * 3600, gt=0)
    """A test without enough rewards after this many seconds rejects the candidate: it must be shown to be as good."""
    rollback: bool = True
    """Roll back automatically when the live version's rewards are significantly below its parent's."""

    @property
    def waits_for(self) -> tuple[SweptTest, ...]:
        """The tests for which a candidate waits once its step has no more to do, in order."""
        return tuple(test for test in self.tests if test != "retention")
