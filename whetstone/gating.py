"""What a candidate must pass before it goes live, and what brings the one before it back. Part of the settings."""

from typing import Literal

from pydantic import Field

from whetstone.worth import Section

GateTest = Literal["heldout", "canary"]


class GateSettings(Section):
    """How a candidate is tested; docs/versions.md has the tests and what they can tell."""

    tests: tuple[GateTest, ...] = ()
    """Tests beside the probe, in this order: `heldout` replays logged prompts of the eval split, `canary` gives the
    candidate a share of the live traffic. The next step waits until they are over."""
    max_k3: float = Field(0.01, gt=0)
    """Probe: largest mean k3 between vLLM's and the trainer's logprobs under the new adapter, in nats a token."""
    max_parent_kl: float = Field(2.0, gt=0)
    """Probe: largest mean k3 from the parent to the candidate, in nats a token of the parent's."""
    max_length_ratio: float = Field(8.0, gt=1)
    """Probe: how many times longer, or shorter, than the parent's the candidate's answers may be on the mean."""
    max_parse_loss: float = Field(0.5, ge=0, le=1)
    """Probe: by how much the share of answers whose tool calls can be parsed may fall below the parent's."""
    smallest_loss: float = Field(0.05, gt=0)
    """The fall in mean reward that the tests are to catch, in units of the reward."""
    error_rate: float = Field(0.05, gt=0, lt=0.5)
    """How often a candidate that is no worse may be rejected, by each test."""
    power: float = Field(0.8, gt=0.5, lt=1)
    """How often a candidate that is worse by `smallest_loss` must be caught, by `canary` and by the watch after it."""
    heldout_prompts: int = Field(256, ge=16)
    """Most prompts of the eval split that `heldout` replays, the newest first."""
    heldout_minimum: int = Field(16, ge=8)
    """Fewest that it can tell anything from; with fewer the candidate is rejected."""
    canary_share: float = Field(0.1, gt=0, le=0.5)
    """Share of new trajectories that the candidate answers during `canary`."""
    deadline_s: float = Field(24 * 3600, gt=0)
    """A test that has not its rewards after so long rejects: what is not known to be as good does not go live."""
    rollback: bool = True
    """Roll back by itself when the live version's rewards are significantly below its parent's."""
