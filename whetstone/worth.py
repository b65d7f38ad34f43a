"""Settings of what attempts are worth: parts, reward functions, judges. Leaves of `whetstone.settings`."""

import math
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from whetstone.bounds import PART


class Section(BaseModel):
    """A group of settings: frozen, closed, documented under each field."""

    # What was put in may be a password: no traceback is to have it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), hide_input_in_errors=True
    )


VARIABLE = r"^[A-Z_][A-Z0-9_]{0,99}$"
"""What a variable that holds a key is called: a key that is put there instead is no such name."""


def without_login(url: str) -> str:
    """The address, which goes into logs and tables.

    Raises:
        ValueError: it holds a name or a password.
    """
    if "@" in urlsplit(url).netloc:
        raise ValueError("an address holds no name and no password: api_key_env names the variable that has the key")
    return url


class RewardFunction(Section):
    """One function or program of yours that looks at a finished trajectory."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """What its number is called among the trajectory's parts."""
    run: str = Field(min_length=1)
    """`package.module:function`, or the path of an executable."""
    kind: Literal["reward", "penalty", "veto"] = "reward"
    """`reward`: its number, times its weight, is added, and is enough alone. `penalty`: is added to what others gave.
    `veto`: where it is not 0, the trajectory gets `failure_reward` (0 without one) and nothing else counts."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """What its number is multiplied by."""
    timeout_s: float = Field(10, gt=0, le=600)
    """Seconds it may take, of the clock and of the CPU."""
    memory_mb: int = Field(1024, ge=64)
    """MiB of address space it may have."""


class JudgeSettings(Section):
    """A model that ranks groups."""

    model: str = Field(min_length=1)
    """Its name for litellm, a dated release rather than an alias (`openai/gpt-4.1-2025-04-14`); `base`: the base model
    that vLLM serves here. It must be able to compare long texts and to answer in JSON: the starter cannot."""
    url: str | None = Field(None, pattern=r"^https?://[^/\s]+")
    """Base URL of an OpenAI-compatible server, `/v1` included; without it the provider's own."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its key."""
    timeout_s: float = Field(120, gt=0, le=3600)
    """How long one answer may take."""
    context_tokens: int = Field(32_000, ge=1024)
    """What it can read and write at once; longer attempts are shortened in the middle (3 characters count as one)."""
    max_output_tokens: int = Field(4096, ge=64)
    """Longest answer; explanations and, of models that think, the thinking included."""
    temperature: float = Field(0, ge=0, le=2)
    """Left out for models that refuse it."""
    usd_per_million_prompt_tokens: float | None = Field(None, ge=0)
    """Its price; without both prices what litellm knows of it, which may be nothing: then its cost is unknown."""
    usd_per_million_completion_tokens: float | None = Field(None, ge=0)
    """Likewise."""
    concurrency: int = Field(4, ge=1, le=256)
    """Groups that one worker has it look at in the same moment."""

    @field_validator("url")
    @classmethod
    def _without_login(cls, url: str | None) -> str | None:
        return None if url is None else without_login(url)

    @model_validator(mode="after")
    def _room_for_attempts(self) -> Self:
        if self.max_output_tokens > self.context_tokens // 2:
            raise ValueError("max_output_tokens is more than half of context_tokens: no room is left for the attempts")
        return self


class RulerSettings(Section):
    """How judges rank the policy's groups (RULER)."""

    judges: tuple[str, ...] = ()
    """Names of `[judges.<name>]`; the judgements of a group go round among them. None: no group is ranked."""
    fallback: tuple[str, ...] = ()
    """Judges that are asked, in this order, for a judgement that one of `judges` will not give."""
    judgements: int = Field(3, ge=1, le=25)
    """Judgements of each group, each with the attempts in another order; the median of an attempt's scores counts."""
    rank: Literal["asked", "shadow", "all"] = "shadow"
    """Which groups are ranked: those that feedback asks for; shadow groups too; or every group in which the app has
    not rewarded all attempts."""
    rubric: Path | None = None
    """Text file of what makes an attempt better than another; without it judge/ruler/rubric.txt."""
    rubrics: dict[str, Path] = {}
    """Rubrics by task (`X-Task`)."""
    parts: dict[str, float] = {}
    """Named parts, each scored from 0 to 1, and their weights: `{correctness = 3, efficiency = 1}`. The score is their
    weighted mean; without any, one score is asked for."""
    weight: float = Field(0, allow_inf_nan=False)
    """Where the app gave a reward too, score times this is added to it; 0: what the app said counts alone."""
    min_spread: float = Field(0.01, ge=0, le=1)
    """Least standard deviation between a group's scores; below it, or below what the judges differ from themselves,
    the group is not trained on (`judge_noise`)."""
    attempts_per_call: int = Field(8, ge=2, le=64)
    """Most attempts that a judge reads at once; of larger groups it reads parts that overlap by half."""
    tries: int = Field(3, ge=1, le=10)
    """Answers of one judge that may be refused before another is asked."""
    wait_s: float = Field(3 * 24 * 3600, gt=0)
    """How long a closed group waits for its judges at most."""
    usd_per_day: float | None = Field(None, ge=0)
    """Once judging this policy has cost so much in a day (UTC), it goes on the next day."""
    tokens_per_day: int | None = Field(None, ge=0)
    """Likewise in tokens, read and written."""
    strong: str | None = None
    """A judge that looks at a sample of the groups too; its scores count for nothing but `admin_judge_drift`."""
    strong_share: float = Field(0.05, ge=0, le=1)
    """Share of the groups that `strong` looks at."""
    review_share: float = Field(0, ge=0, le=1)
    """Share of the ranked attempts that `admin_reviews` asks people to look at."""

    @field_validator("parts")
    @classmethod
    def _weighed(cls, parts: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name in parts if not PART.fullmatch(name)]:
            raise ValueError(f"{wrong[0][:80]!r} is no name of a part; it is 1 to 64 of A-Z a-z 0-9 . _ -")
        if parts and not (all(0 <= weight < math.inf for weight in parts.values()) and sum(parts.values()) > 0):
            raise ValueError("the weights of parts are at least 0, and one is above")
        return parts

    @property
    def named(self) -> tuple[str, ...]:
        """Every judge it names."""
        return (*self.judges, *self.fallback, *((self.strong,) if self.strong else ()))


class LearningSettings(Section):
    """What one policy's attempts are worth, and what they are compared with."""

    weights: dict[str, float] = {}
    """What each part of a feedback's `parts` is multiplied by; 1 for those that are not here."""
    failure_reward: float | None = Field(None, allow_inf_nan=False)
    """Reward of an attempt that broke off (its last call failed or was aborted and nothing came after it) or of which
    nobody told, though others of its group have a reward; without it such attempts are left out."""
    baseline: bool = True
    """Whether a rewarded trajectory that stays alone is compared with the running mean of its task."""
    shadow_share: float = Field(0, ge=0, le=1)
    """Share of ended trajectories for which siblings are drawn when idle, for the judge to rank; never with tools."""
    shadow_size: int = Field(3, ge=1, le=16)
    """How many siblings."""
    rewards: tuple[RewardFunction, ...] = ()
    """Functions and programs that look at every finished trajectory of the policy."""
    ruler: RulerSettings = RulerSettings()
    """How judges rank its groups: `[learning.<policy>.ruler]`."""

    @field_validator("weights")
    @classmethod
    def _finite(cls, weights: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, weight in weights.items() if not math.isfinite(weight)]:
            raise ValueError(f"the weight of {wrong[0]!r} is not a finite number")
        return weights

    @field_validator("rewards")
    @classmethod
    def _one_name_each(cls, rewards: tuple[RewardFunction, ...]) -> tuple[RewardFunction, ...]:
        names = [reward.name for reward in rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two reward functions are named {twice[0]!r}")
        return rewards
