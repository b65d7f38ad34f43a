"""How a step is taken: when it is due, what it takes, its loss, its optimizer, its machine. Part of the settings."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from whetstone.worth import Section

LossName = Literal["dppo_tv", "cispo", "dapo", "grpo", "dr_grpo", "gspo"]
AdvantageScale = Literal["none", "batch", "group"]
Kind = Literal["grpo", "sft"]
"""What a step does: follow advantages by the loss of the settings, or imitate answers."""
DEMONSTRATIONS, BEST = "demonstrations", "best"
"""What a step may imitate beside another policy's answers; no policy is called so."""


class TrainerSettings(Section):
    """How a step is taken."""

    groups_per_step: int = Field(12, ge=1)
    """Fewest scored groups with different rewards that start a step; trajectories that are alone count in part."""
    max_groups_per_step: int = Field(32, ge=1)
    """Most groups one step takes; the oldest first."""
    singles_per_step: int = Field(192, ge=2)
    """So many trajectories that are alone count as much as `groups_per_step` groups; a step takes up to four times as
    many."""
    step_waits_s: float | None = Field(None, gt=0)
    """After so long with fewer groups than `groups_per_step`, a step starts with `min_groups_per_step`; without it, it
    waits for all of them."""
    min_groups_per_step: int = Field(4, ge=1)
    """Fewest groups that start a step that has waited for `step_waits_s`, or that `schedule` starts."""
    schedule: str | None = None
    """Times in UTC as cron writes them: `0 3 * * *` trains each night at three on what was closed by then, and on
    nothing else but by hand."""
    min_fresh_share: float = Field(0.35, ge=0, le=1)
    """Share of a step's sampled tokens that must lie in trajectories of the version it starts from."""
    fresh_waits_s: float = Field(120, ge=0)
    """A step that lacks fresh trajectories starts all the same after this long."""
    max_staleness: int = Field(4, ge=0)
    """Most updates between the oldest version that spoke in a trajectory and the one the step starts from; older
    groups are discarded (`stale`)."""
    loss: LossName = "dppo_tv"
    """Which loss; docs/training.md has their formulas."""
    clip_low: float | None = Field(None, ge=0)
    """How far down a token may move before it no longer counts; the default is the loss's paper's."""
    clip_high: float | None = Field(None, gt=0)
    """Likewise up: of its probability (dppo_tv), its ratio above 1 (dapo, grpo, dr_grpo, gspo), its ratio (cispo)."""
    tv_regulariser: float = Field(1e-3, ge=0)
    """dppo_tv: weight of (π - μ)², trainer against inference probability."""
    max_ratio: float = Field(1000, gt=1)
    """A token that the trainer finds so many times likelier than the server did is left out of the loss."""
    kl_weight: float = Field(0, ge=0)
    """Weight of each token's k3 to the base model in the loss."""
    measure_kl: bool = True
    """Measure each step's distance from the base model: a forward pass more, about a quarter of its time."""
    entropy_weight: float = Field(0, ge=0)
    """Weight of the mean entropy, which is taken off the loss."""
    advantage_scale: AdvantageScale = "none"
    """Divide advantages by the standard deviation of the step's rewards, of the group's, or by nothing."""
    max_answer_tokens: int = Field(4096, ge=1)
    """dr_grpo divides by this instead of an answer's length."""
    learning_rate: float = Field(1e-3, gt=0)
    """AdamW's. 1e-3 suits the starter; 5e-5 models up to 1B, 1e-5 those from 7B."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """Scale of the adapters: alpha / rank."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient; above it the gradient is scaled down."""
    backend: Literal["hf", "unsloth"] = "hf"
    """Who computes: transformers and peft, or Unsloth in an environment of its own."""
    python: Path | None = None
    """Python of another environment that the training worker runs in: Unsloth's, or one with CUDA beside a server."""
    trees: bool = True
    """Read what rows share once, and several rows in one sequence, if the start proves that this model keeps them
    apart."""
    attention: Literal["auto", "segments", "dense", "flex"] = "auto"
    """How a tree of rows is read: piece by piece, under one dense mask, or by compiled flex-attention; `auto` takes
    flex-attention for long ones on CUDA."""
    gradient_checkpointing: bool | None = None
    """Compute each layer again on the way back rather than keep its results; the default is yes on accelerators."""
    micro_batch_tokens: int = Field(8192, ge=64)
    """Tokens of one forward and backward pass."""
    max_row_tokens: int = Field(8192, ge=16)
    """A trajectory with a longer row is not trained on (`too_long`)."""
    processes: int = Field(1, ge=1)
    """Processes of one step, each with a device of its own, launched by accelerate."""
    threads: int = Field(1, ge=1)
    """torch's CPU threads. On two cores beside a busy vLLM one is as fast as two."""
    niceness: int = Field(5, ge=0, le=19)
    """Priority of the training worker on the CPU: it yields to serving. From 10 on, a busy server starves it."""
    device: str = "auto"
    """`cpu`, `cuda`, `mps`, or `auto`: the first of cuda, mps and cpu that is there."""
    lease_s: float = Field(120, gt=0)
    """A step whose worker was silent for this long is taken over."""
    max_attempts: int = Field(5, ge=1)
    """A step that was begun so often and never ended is failed; its trajectories are left out (`step_failed`)."""
    keep_served: int = Field(2, ge=0)
    """Retired versions that vLLM keeps loaded beside the live one; trajectories that began on them stay on them."""
    keep_adapters: int = Field(20, ge=1)
    """Adapters of a policy that stay on the disk however old they are, the newest."""
    keep_adapters_s: float = Field(7 * 24 * 3600, ge=0)
    """Others stay this long. The live, pinned and best ones, and those that vLLM has loaded, always do."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where a step's figures go besides SQL; each needs its package installed."""

    @field_validator("schedule")
    @classmethod
    def _cron(cls, schedule: str | None) -> str | None:
        if schedule is None:
            return None
        from celery.schedules import ParseException, crontab  # a third of a second, which few need

        try:
            crontab.from_string(schedule)
        except (ParseException, ValueError) as error:
            raise ValueError(f"{schedule!r} is not five fields as cron writes them, like 0 3 * * *: {error}") from error
        return schedule

    @model_validator(mode="after")
    def _room_for_a_step(self) -> Self:
        if self.max_groups_per_step < max(self.groups_per_step, self.min_groups_per_step):
            raise ValueError(
                "max_groups_per_step is below groups_per_step or min_groups_per_step: no step would ever be due"
            )
        return self

    @model_validator(mode="after")
    def _device_for_each(self) -> Self:
        if self.processes > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"several processes take a device each: set device to cuda or cpu, not {self.device}")
        if self.processes > 1 and self.backend != "hf":
            raise ValueError(f"backend {self.backend} takes one process: set processes to 1, or backend to hf")
        return self
