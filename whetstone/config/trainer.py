"""Settings of training steps: when a step is due, what it takes, its loss, its optimizer, its device."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from whetstone.config.rewards import Section

LossName = Literal["dppo_tv", "cispo", "dapo", "grpo", "dr_grpo", "gspo"]
AdvantageScale = Literal["none", "batch", "group", "mean", "parts"]
BaselineName = Literal["group", "state"]
CutOff = Literal["train", "mask", "clamp"]
Objective = Literal["grpo", "kto", "dpo"]
Quantisation = Literal["none", "nf4", "int8"]
Kind = Literal[Objective, "sft", "hindsight", "distill", "prefer"]
"""What a step does: `grpo` follows advantages with the configured loss, `kto` tells good answers from bad ones, `dpo`
better from worse in a group, `sft` imitates answers, `hindsight` learns from words that correct an answer, `distill`
from how likely a teacher finds each token of an answer, `prefer` as dpo does from pairs of another policy's answers."""
PREFERENCES: tuple[Kind, ...] = ("kto", "dpo", "prefer")
BY_EXAMPLE: tuple[Kind, ...] = ("sft", "hindsight", "distill", "prefer")
DEMONSTRATIONS, BEST = "demonstrations", "best"
"""What a step may imitate besides another policy's answers; no policy may have these names."""
COMMENTS, JUDGE, TOOLS, REPLIES = "comments", "judge", "tools", "replies"
CORRECTIONS = (COMMENTS, DEMONSTRATIONS, JUDGE, TOOLS, REPLIES)
"""Where the words of a hindsight step may come from: feedback (the first two), a judge's explanation, the error of a
tool that the answer called, the user's next message."""
CORRECTION = "{correction}"
"""Stands for the correction in a hindsight step's template."""


class TrainerSettings(Section):
    """Settings of training steps."""

    groups_per_step: int = Field(12, ge=1)
    """Fewest scored groups with different rewards that start a step; single trajectories count in part."""
    max_groups_per_step: int = Field(32, ge=1)
    """Most groups that one step takes; the oldest first."""
    singles_per_step: int = Field(192, ge=2)
    """This many single trajectories count as much as `groups_per_step` groups; a step takes up to four times this
    number."""
    step_waits_s: float | None = Field(None, gt=0)
    """After this many seconds with fewer groups than `groups_per_step`, a step starts if there are
    `min_groups_per_step`. Unset: it waits for `groups_per_step`."""
    min_groups_per_step: int = Field(4, ge=1)
    """Fewest groups for a step that has waited for `step_waits_s`, or that `schedule` starts."""
    schedule: str | None = None
    """Times in UTC in cron format: `0 3 * * *` trains each night at three on the groups closed by then. Steps then
    start only on schedule or by hand."""
    min_fresh_share: float = Field(0.35, ge=0, le=1)
    """Share of a step's sampled tokens that must come from trajectories of the version that the step starts from."""
    fresh_waits_s: float = Field(120, ge=0)
    """A step that lacks fresh trajectories starts anyway once its oldest group has waited for this many seconds, and
    the live version has been live for as long."""
    max_staleness: int = Field(4, ge=0)
    """Most updates between the oldest version that sampled in a trajectory and the version that the step starts from;
    older groups are discarded (`stale`)."""
    objective: Objective = "grpo"
    """What a step makes of rewards: `grpo` follows advantages with `loss`; `kto` makes good trajectories likelier and
    bad ones less likely, each by itself, as thumbs say it; `dpo` prefers better to worse trajectories of a group."""
    loss: LossName = "dppo_tv"
    """Which loss of `grpo`; docs/training.md has the formulas."""
    clip_low: float | None = Field(None, ge=0)
    """How far a token's probability may fall before the token is clipped; the default is that of the loss's paper."""
    clip_high: float | None = Field(None, gt=0)
    """The same upwards, measured as the change of probability (dppo_tv), the ratio minus 1 (dapo, grpo, dr_grpo, gspo),
    or the ratio (cispo)."""
    tv_regulariser: float = Field(1e-3, ge=0)
    """dppo_tv: weight of (π - μ)², the squared difference of the trainer's and the server's probability."""
    max_ratio: float = Field(8, gt=1)
    """A token that is more than this many times likelier in the trainer than in the server is left out of the loss: it
    would weigh that much more than others. 8 is prime-rl's."""
    max_sequence_ratio: float | None = Field(None, gt=1)
    """A row whose tokens are, in their geometric mean, more than this many times likelier in the trainer than in the
    server, or less likely, is left out of the loss. Unset: no such bound."""
    kl_weight: float = Field(0, ge=0)
    """Weight in the loss of each token's k3 to the base model."""
    measure_kl: bool = True
    """Measure each step's distance from the base model, with an extra forward pass over `kl_share` of its rows."""
    kl_share: float = Field(0.05, gt=0, le=1)
    """Share of a step's rows, drawn at random, that `measure_kl` measures, and more until they have 128 sampled tokens;
    all of them take about a quarter of the step's time. With `kl_weight` it is always all."""
    entropy_weight: float = Field(0, ge=0)
    """Weight of the mean entropy, which is subtracted from the loss."""
    advantage_scale: AdvantageScale = "none"
    """Divide advantages by the standard deviation of the step's rewards (`batch`) or of the group's (`group`), by the
    mean of the group's (`mean`), or not at all. `parts`: compare each part of the rewards by itself, divided by its
    standard deviation in the group, before parts are weighted and added up."""
    cut_off: CutOff | None = None
    """What to do with a trajectory whose last answer was ended by a length limit: train on it like any other (`train`),
    leave it out (`mask`), or let it become less likely but never likelier (`clamp`; kto and dpo leave it out). Unset:
    `mask` where a judge gave the reward, else `train`."""
    baseline: BaselineName = "group"
    """What rewards are compared with: those of the same group (`group`), or, where several trajectories met the same
    prompt, those of all that did (`state`); docs/training.md has the formula."""
    single_baseline: Literal["task", "prompt"] = "task"
    """What the reward of a single is compared with: rewards of its task and user (`task`), or besides, where its very
    prompt was answered before, the rewards of that (`prompt`). For apps that ask the same prompts again and again."""
    prompt_half_life: float = Field(0.1, gt=0)
    """A reward of the same prompt counts half after the policy has moved this far, in nats a token; added up are the
    probes' `parent_kl`."""
    preference_beta: float = Field(0.1, gt=0)
    """kto and dpo: how much a trajectory's log ratio to the reference counts; larger stays nearer to the reference."""
    reference_version: int = Field(0, ge=0)
    """kto and dpo: the version of the policy that they compare with, 0 for the base model. Pin another one, so that its
    adapter stays. Also the teacher of hindsight steps with `hindsight_teacher = "reference"`."""
    kto_desirable_above: float = 0.5
    """kto: a trajectory with a reward above this is good, any other bad; thumbs up are 1, thumbs down 0."""
    kto_desirable_weight: float = Field(1, ge=0)
    """kto: weight of the good trajectories."""
    kto_undesirable_weight: float = Field(1, ge=0)
    """kto: weight of the bad ones. The paper weighs so that good and bad count about alike in a step."""
    hindsight_template: Path | None = None
    """hindsight: a text file with the words by which the correction is added to the last question, `{correction}` among
    them; unset: `(Note: {correction})` in a paragraph of its own."""
    hindsight_teacher: Literal["reference", "self"] = "reference"
    """hindsight: who reads the correction: `reference_version`, which does not move with the policy, or the version
    that the step starts from (`self`), which may collapse."""
    hindsight_temperature: float = Field(0.5, gt=0)
    """hindsight: temperature of the teacher; below 1 it is surer than it was."""
    hindsight_top: int = Field(20, ge=1)
    """hindsight: how many of the teacher's likeliest tokens are compared; the rest is compared as one."""
    hindsight_alpha: float = Field(0.5, ge=0, le=1)
    """hindsight: which divergence. 0: KL(teacher to student); 1: KL(student to teacher); between: the generalised
    Jensen-Shannon divergence with this weight on the teacher."""
    hindsight_in_a_row: int = Field(20, ge=1)
    """hindsight: most such versions in a row. A policy that learns from its own corrected answers alone may collapse;
    a step of another kind starts the count again."""
    distill_top: int = Field(20, ge=1)
    """distill: how many of the teacher's likeliest tokens are compared, the rest as one. At most what the teacher's
    server gives: vLLM's --max-logprobs, 20 by default."""
    distill_alpha: float = Field(1, ge=0, le=1)
    """distill: which divergence, as `hindsight_alpha`. 1, the reverse KL, makes the student give up what the teacher
    finds unlikely, instead of spreading over all that the teacher might say."""
    replay_share: float = Field(0, ge=0, le=1)
    """grpo: this share of a step's rows, rounded up, is the number of past attempts that the step imitates beside them:
    the best of each group, as `whetstone step --imitate best` chooses them. 0: none."""
    replay_weight: float = Field(0.1, gt=0)
    """grpo: weight in the loss of the mean negative log-likelihood of these attempts' tokens."""
    echo_weight: float = Field(0, ge=0)
    """grpo: weight in the loss of the mean cross-entropy of what tools returned. These are the tokens between two
    answers of a row, the template's tokens around them included, if all messages between them are results of tools. Of
    a turn in which a user wrote something too, the tokens are not known apart: it is only read. 0: all of them are."""
    max_answer_tokens: int = Field(4096, ge=1)
    """dr_grpo divides by this number instead of an answer's length."""
    learning_rate: float | None = Field(None, gt=0)
    """AdamW's learning rate; unset: by the base model's size, 1e-3 for the starter, 5e-5 from 0.1B to 1B, falling to
    1e-5 at 7B and above."""
    sft_learning_rate: float | None = Field(None, gt=0)
    """The learning rate of supervised steps; unset: `learning_rate`."""
    sft_epochs: int = Field(1, ge=1)
    """How often a supervised step reads its answers, each time in another order."""
    sft_rows_per_update: int | None = Field(None, ge=1)
    """Rows of each optimizer update of a supervised step; unset: `updates_per_step` divides them."""
    warmup_updates: int = Field(0, ge=0)
    """The learning rate rises in a straight line over this many updates of a policy, counted by its optimizer."""
    decay_updates: int | None = Field(None, ge=1)
    """After the warm-up the learning rate falls along half a cosine over this many updates, to a tenth, and stays
    there. Unset: it stays as it is."""
    weight_decay: float = Field(0, ge=0)
    """AdamW's weight decay."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates of a step: its trajectories are divided into this many parts, groups together, and each part is
    one update."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """Scale of the adapters: alpha / rank."""
    clip_norm: float = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger gradient is scaled down."""
    backend: Literal["hf", "unsloth"] = "hf"
    """Training backend: `hf` (transformers and peft), or `unsloth` in an environment of its own."""
    quantisation: Quantisation = "none"
    """Bits of the base model's linear layers in the trainer: `none`, those of its files; `nf4`, 4.1; `int8`, 8. By
    bitsandbytes, with the backend `hf`; adapters stay in fp32. vLLM serves the model as its files are, so the trainer's
    probabilities are off by what quantising costs: `mismatch_k3`, which the gate bounds."""
    python: Path | None = None
    """Python of another environment for the training worker: Unsloth's, or one with CUDA."""
    trees: bool = True
    """Compute the shared prefix of rows once, and several rows in one sequence, if a test at start shows that the model
    keeps the rows separate."""
    attention: Literal["auto", "segments", "dense", "flex"] = "auto"
    """How a tree of rows is computed: piece by piece, with one dense mask, or with compiled flex-attention; `auto` uses
    flex-attention for long trees on CUDA."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass instead of keeping its activations; by default on accelerators only."""
    activation_offload: bool = False
    """Keep what gradient checkpointing stores, the inputs of the layers, in pinned host memory: longer rows fit, and a
    step takes longer. On a CPU it changes nothing; the backend `unsloth` always does it where it checkpoints."""
    micro_batch_tokens: int = Field(8192, ge=64)
    """Most tokens of one forward and backward pass. Where the device's memory runs out, half of it is tried, and so on,
    until the training worker starts again."""
    probe_memory: bool | None = None
    """Try one largest micro-batch before a worker's first step, so that memory does not run out in the middle of it; by
    default on accelerators only."""
    max_row_tokens: int = Field(8192, ge=16)
    """A trajectory with a longer row is not trained on (`too_long`)."""
    processes: int = Field(1, ge=1)
    """Processes of one step, each with its own device, launched by accelerate."""
    policies_at_once: int = Field(1, ge=1)
    """Policies whose steps a worker takes at the same time: they compute in turns, while the candidates of the others
    are loaded, probed and promoted together. Needs one process and a device that vLLM does not share; each holds the
    rows of its step in memory. `vllm.max_loras` bounds how many adapters vLLM answers with at once."""
    sharding: Literal["none", "fsdp"] = "none"
    """`fsdp` divides the base model among the `processes`, where it is too large for one device; each layer is gathered
    while it computes. `none`: each process has all of it."""
    threads: int = Field(1, ge=1)
    """torch's CPU threads. On two cores next to a busy vLLM, one is as fast as two."""
    niceness: int = Field(5, ge=0, le=19)
    """Niceness of the training worker: it yields the CPU to serving. From 10, a busy server starves it."""
    device: str = "auto"
    """`cpu`, `cuda`, `mps`, or `auto`: the first available of cuda, mps and cpu."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the training worker that `up` starts, one for each process, by their numbers in nvidia-smi; empty: those
    that vLLM leaves, else vLLM's."""
    offload: bool | None = None
    """Keep the model in pinned host memory between steps, so that vLLM has the card; unset: where `vllm.shares_device`
    is set."""
    lease_s: float = Field(120, gt=0)
    """A step whose worker has not renewed its lease for this many seconds is taken over."""
    max_attempts: int = Field(5, ge=1)
    """A step that was started this often without ending is failed; its trajectories are left out (`step_failed`)."""
    keep_served: int = Field(2, ge=0)
    """Retired versions that vLLM keeps loaded beside the live one; trajectories that began on them stay on them."""
    keep_adapters: int = Field(20, ge=1)
    """Newest adapters of a policy that stay on the disk regardless of age, if `max_adapter_bytes` has room."""
    keep_adapters_s: float = Field(7 * 24 * 3600, ge=0)
    """Older adapters are deleted after this many seconds. Live, pinned and best adapters, candidates, and those loaded
    in vLLM, are never deleted. The optimizer's state stays only with the newest two, the live one and its parent."""
    max_adapter_bytes: int = Field(20 * 10**9, ge=1)
    """Most bytes of a policy's adapters on the disk, the next one included: the oldest are deleted first, whatever
    their age."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where a step's metrics are sent in addition to SQL; each needs its package installed."""

    @field_validator("hindsight_template")
    @classmethod
    def _holds_the_correction(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if CORRECTION not in text:
            raise ValueError(f"{path} does not contain {CORRECTION}, which the correction takes the place of")
        return path

    @field_validator("schedule")
    @classmethod
    def _cron(cls, schedule: str | None) -> str | None:
        if schedule is None:
            return None
        from celery.schedules import ParseException, crontab  # takes a third of a second; few need it

        try:
            crontab.from_string(schedule)
        except (ParseException, ValueError) as error:
            raise ValueError(f"{schedule!r} is not five fields as cron writes them, like 0 3 * * *: {error}") from error
        return schedule

    @property
    def compares_parts(self) -> bool:
        """Whether steps compare the parts of rewards, which are then read."""
        return self.objective == "grpo" and self.advantage_scale == "parts"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_groups_per_step < max(self.groups_per_step, self.min_groups_per_step):
            raise ValueError(
                "max_groups_per_step is below groups_per_step or min_groups_per_step: no step would ever be due"
            )
        if self.advantage_scale == "parts" and self.baseline == "state":
            raise ValueError(
                "advantage_scale parts compares the parts of rewards within a group, and baseline state whole rewards "
                "where prompts meet: set baseline to group, or another advantage_scale"
            )
        if self.replay_share and self.objective != "grpo":
            raise ValueError(f"replay_share is of steps with the objective grpo: with {self.objective} set it to 0")
        if self.echo_weight and self.objective != "grpo":
            raise ValueError(f"echo_weight is of steps with the objective grpo: with {self.objective} set it to 0")
        if self.processes > 1 and self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"several processes take a device each: set device to cuda or cpu, not {self.device}")
        if self.devices and len(self.devices) < self.processes:
            raise ValueError(
                f"devices names {len(self.devices)} GPUs for {self.processes} processes, which take one each"
            )
        if self.quantisation != "none" and self.backend != "hf":
            raise ValueError(
                f"quantisation {self.quantisation} takes the backend hf, not {self.backend}: set one of the two"
            )
        if self.activation_offload and self.gradient_checkpointing is False:
            raise ValueError(
                "activation_offload moves what gradient checkpointing stores: leave gradient_checkpointing unset"
            )
        if self.processes > 1 and self.backend != "hf":
            raise ValueError(f"backend {self.backend} takes one process: set processes to 1, or backend to hf")
        if self.policies_at_once > 1 and self.processes > 1:
            raise ValueError(
                f"the {self.processes} processes of a step take one policy at a time: set policies_at_once to 1, or "
                "processes to 1"
            )
        self._check_sharding()
        return self

    def _check_sharding(self) -> None:
        if self.sharding == "none":
            return
        if self.processes == 1:
            raise ValueError(
                "sharding fsdp divides the base model among processes: set processes to 2 or more, or sharding to none"
            )
        if self.quantisation != "none":
            raise ValueError(
                f"quantisation {self.quantisation} and sharding fsdp do not go together: set one of them to none"
            )
        if self.offload:
            raise ValueError("a sharded base model stays on its devices: set offload to false, or sharding to none")
        if self.probe_memory:
            raise ValueError(
                "memory that runs out in one process of a sharded base model ends them all, so it cannot be probed: "
                "set probe_memory to false and micro_batch_tokens to what fits, or sharding to none"
            )
