"""Settings of rewards: feedback parts, reward functions and judges."""

import math
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from whetstone.domain.reward_bounds import PART


class Section(BaseModel):
    """A group of settings: frozen, closed, and documented under each field."""

    # Inputs may contain a password: keep them out of tracebacks.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), hide_input_in_errors=True
    )


VARIABLE = r"^[A-Z_][A-Z0-9_]{0,99}$"
"""Names of variables that hold a key. A key entered here by mistake does not match."""


def without_login(url: str) -> str:
    """Return the URL, which appears in logs and tables.

    Raises:
        ValueError: it contains a user name or a password.
    """
    if "@" in urlsplit(url).netloc:
        raise ValueError("an address holds no name and no password: api_key_env names the variable that has the key")
    return url


Url = Annotated[str, Field(pattern=r"^https?://[^/\s]+"), AfterValidator(without_login)]
"""The address of another server."""


class RewardFunction(Section):
    """A function or program of yours that scores a finished trajectory."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of its score among the trajectory's parts."""
    run: str = Field(min_length=1)
    """`package.module:function`, or the path of an executable."""
    kind: Literal["reward", "penalty", "veto"] = "reward"
    """`reward`: its score times its weight is added, and is a sufficient reward on its own. `penalty`: added to other
    rewards only. `veto`: if it is not 0, the trajectory gets `failure_reward` (0 if unset) and nothing else counts."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of its score."""
    timeout_s: float = Field(10, gt=0, le=600)
    """Most seconds it may take, both of wall-clock and of CPU time."""
    memory_mb: int = Field(1024, ge=64)
    """MiB of address space it may use."""


BASE = "base"
"""The judge's model that is the base model which vLLM serves here."""


class JudgeSettings(Section):
    """A model that ranks groups."""

    model: str = Field(min_length=1)
    """Model name for litellm, a dated release rather than an alias (`openai/gpt-4.1-2025-04-14`); `base`: the base
    model that vLLM serves here. It must be able to compare long texts and to answer in JSON, which the starter
    cannot."""
    url: Url | None = None
    """Base URL of an OpenAI-compatible server, including `/v1`; unset: the provider's own."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its API key."""
    timeout_s: float = Field(120, gt=0, le=3600)
    """How long one answer may take, in seconds."""
    context_tokens: int = Field(32_000, ge=1024)
    """Context window, prompt plus answer, in tokens; longer attempts are shortened in the middle (3 characters count as
    one token)."""
    max_output_tokens: int = Field(4096, ge=64)
    """Longest answer, in tokens: explanations and, for reasoning models, the reasoning included."""
    temperature: float = Field(0, ge=0, le=2)
    """Sampling temperature; not sent to models that reject it."""
    usd_per_million_prompt_tokens: float | None = Field(None, ge=0)
    """Price of prompt tokens. Unless both prices are set, litellm's price is used; if litellm has none, the cost is
    unknown."""
    usd_per_million_completion_tokens: float | None = Field(None, ge=0)
    """Price of answer tokens, in the same way."""
    concurrency: int = Field(4, ge=1, le=256)
    """Groups that one worker sends to this judge at the same time."""

    @model_validator(mode="after")
    def _room_for_attempts(self) -> Self:
        if self.max_output_tokens > self.context_tokens // 2:
            raise ValueError("max_output_tokens is more than half of context_tokens: no room is left for the attempts")
        return self


class RulerSettings(Section):
    """How judges rank the policy's groups (RULER)."""

    judges: tuple[str, ...] = ()
    """Names of `[judges.<name>]`; the judgements of a group rotate among them. Empty: no group is ranked."""
    fallback: tuple[str, ...] = ()
    """Judges to try, in this order, when a judge of `judges` returns no valid judgement."""
    judgements: int = Field(3, ge=1, le=25)
    """Judgements of each group, each with the attempts in another order; an attempt's score is the median."""
    rank: Literal["asked", "shadow", "all"] = "shadow"
    """Which groups are ranked: `asked` those that feedback requests, `shadow` also shadow groups, `all` every group in
    which the app has not rewarded all attempts."""
    rubric: Path | None = None
    """Text file that describes what makes an attempt better than another; unset: judge/ruler/rubric.txt."""
    rubrics: dict[str, Path] = {}
    """Rubrics by task (`X-Task`)."""
    parts: dict[str, float] = {}
    """Named parts, each scored from 0 to 1, and their weights: `{correctness = 3, efficiency = 1}`. The score is their
    weighted mean; if empty, the judge gives a single score."""
    by_turn: bool = False
    """Have each answer of an attempt scored as well. What an answer got above or below the mean of its attempt counts
    as earned there (credit by step); the attempt's reward stays the score of the whole."""
    weight: float = Field(0, allow_inf_nan=False)
    """If the app gave a reward too, the score times this weight is added to it; 0: only the app's reward counts."""
    min_spread: float = Field(0.01, ge=0, le=1)
    """Smallest standard deviation of a group's scores. Below it, or below the disagreement between judgements, the
    group is not trained on (`judge_noise`)."""
    attempts_per_call: int = Field(8, ge=2, le=64)
    """Most attempts that a judge reads at once; larger groups are judged in batches that overlap by half."""
    tries: int = Field(3, ge=1, le=10)
    """Invalid answers of one judge before the next judge is tried."""
    wait_s: float = Field(3 * 24 * 3600, gt=0)
    """How long a closed group waits for its judges at most, in seconds."""
    usd_per_day: float | None = Field(None, ge=0)
    """Once judging this policy has cost this much in a day (UTC), it pauses until the next day."""
    tokens_per_day: int | None = Field(None, ge=0)
    """Daily limit in tokens, read and written, with the same effect."""
    strong: str | None = None
    """A judge that also scores a sample of the groups; its scores are used only for `admin_judge_drift`."""
    strong_share: float = Field(0.05, ge=0, le=1)
    """Share of the groups that `strong` scores."""
    review_share: float = Field(0, ge=0, le=1)
    """Share of the ranked attempts that `admin_reviews` presents to people for review."""

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
        """Names of all judges that this section uses."""
        return (*self.judges, *self.fallback, *((self.strong,) if self.strong else ()))


class ExploreSettings(Section):
    """How a policy learns from apps that set temperature 0, with which nothing is sampled."""

    share: float = Field(0, ge=0, le=1)
    """Share of the calls with temperature 0 that are sampled at `temperature` instead; the response says so
    (`X-Explored`). Never explored: the split `eval`, `X-No-Train`, calls to a fixed version (`policy@v3`), and calls
    that something else keeps from training."""
    temperature: float | None = Field(None, ge=0.01, le=2)
    """Temperature to explore with; unset: the policy does not explore. Shadow siblings (`shadow_share`) of calls with
    temperature 0 are sampled at it too, whatever `share` is."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.share and self.temperature is None:
            raise ValueError("explore.share needs explore.temperature, the temperature to explore with")
        return self


class HandoverSettings(Section):
    """How a policy takes over from a model of another server: at first that model answers most requests for the policy,
    and the policy itself a share that grows as far as its rewards allow."""

    teacher: str
    """The policy of another server (`models` of `[upstreams.<name>]`) that answers in this one's place. Give it a name
    that no app requests: all its rewards are compared with this policy's."""
    shares: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field((0.05, 0.1, 0.25, 0.5, 0.9), min_length=1)
    """Shares of new trajectories that this policy answers itself, in rising order; it begins with the first. At 1
    the teacher answers nothing, and nothing is compared."""
    margin: float = Field(0.05, ge=0, allow_inf_nan=False)
    """How far this policy's mean reward may be below the teacher's, in units of the reward."""
    error_rate: float = Field(0.05, gt=0, lt=0.5)
    """How often, at most, the share rises although the policy is `margin` below the teacher, or falls although it is
    no further below."""
    usd_per_million_prompt_tokens: float | None = Field(None, ge=0)
    """The teacher's price of prompt tokens, to show what is saved and for `spending.usd_per_day`. Unless both prices
    are set, those of its server (`[upstreams.<name>]`) are used."""
    usd_per_million_completion_tokens: float | None = Field(None, ge=0)
    """The teacher's price of answer tokens, in the same way."""

    @field_validator("shares")
    @classmethod
    def _rising(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if list(shares) != sorted(set(shares)):
            raise ValueError(f"shares must rise: {', '.join(f'{share:g}' for share in sorted(set(shares)))}")
        return shares


class RewardSettings(Section):
    """How one policy's attempts are rewarded, and what their rewards are compared with."""

    weights: dict[str, float] = {}
    """Weight of each part of a feedback's `parts`; 1 for parts that are not listed."""
    failure_reward: float | None = Field(None, allow_inf_nan=False)
    """Reward of an attempt that broke off (its last call failed or was aborted and nothing followed) or that got no
    feedback although others of its group have a reward; unset: such attempts are left out."""
    baseline: bool = True
    """Whether a rewarded trajectory without a group is compared with the running mean of its task."""
    shadow_share: float = Field(0, ge=0, le=1)
    """Share of ended trajectories for which siblings are sampled when the system is idle, for the judge to rank; never
    for trajectories with tools."""
    shadow_size: int = Field(3, ge=1, le=16)
    """Siblings per shadow group."""
    rewards: tuple[RewardFunction, ...] = ()
    """Functions and programs that score every finished trajectory of the policy."""
    ruler: RulerSettings = RulerSettings()
    """How judges rank the policy's groups: `[learning.<policy>.ruler]`."""
    explore: ExploreSettings = ExploreSettings()
    """How calls with temperature 0 are explored: `[learning.<policy>.explore]`."""
    handover: HandoverSettings | None = None
    """A model of another server that answers first, until the policy is as good: `[learning.<policy>.handover]`."""

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
