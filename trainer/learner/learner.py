"""Train one policy: the base model, its LoRA, and the LoRA's AdamW and RNG.

If anything raises during a step, the weights, the optimizer and the RNG are as they were before it; but for memory that
runs out in the update itself.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.domain.base import BaseModel
from trainer.domain.constraints import ConstrainedSpan
from trainer.domain.figures import StepFigures
from trainer.domain.measured import MeasuredRows, spans_to_measure, static_measures, without_decided
from trainer.domain.rows import Answer, Row, rows_for_sft
from trainer.errors import AdapterMismatch, NotFinite, RowError, RowsDoNotFit
from trainer.learner import updates
from trainer.learner.backends import backend_of, check_base, device_of
from trainer.learner.base.quantised import base_parameters
from trainer.learner.base.residence import Residence
from trainer.learner.base.shared import SharedBase, shared_base
from trainer.learner.constrained import measuring
from trainer.learner.forward import Reading
from trainer.learner.gradient import beforehand, memory
from trainer.learner.gradient.accumulation import Accumulation
from trainer.learner.gradient.divergence import given_targets
from trainer.learner.gradient.objective import Objective, Sums, Terms, figures_of
from trainer.learner.gradient.preferences import preference_loss
from trainer.learner.processes.collective import Alone, Collective, Plan
from trainer.learner.sharded.lockstep import Free, Lockstep
from whetstone.config.trainer import PREFERENCES, Kind, Quantisation, TrainerSettings
from whetstone.memory.learning_rate import learning_rate_of
from whetstone.registry.adapters import OPTIMIZER_STATE, AdapterDamaged, is_pulled, verify

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
RNG_STATE = "rng.safetensors"

ALONE: Collective = Alone()
Method = TypeVar("Method", bound=Callable[..., Any])

log = logging.getLogger(__name__)

HALF_LOSS_SCALE = 2.0**12
"""In fp16 the gradient of one token of a large step would round to 0, so the loss is scaled. The adapter's own
gradients are fp32.
"""


def _on_device(method: Method) -> Method:
    """Have the learner's weights on its device during the method."""

    @wraps(method)
    def present(learner: "Learner", *args: Any, **named: Any) -> Any:
        with learner._present():
            return method(learner, *args, **named)

    return cast(Method, present)


class Learner:
    """A base model with one LoRA in training. Created by `fresh` or `resume`."""

    can_double = True
    """Whether `doubled` is possible."""

    def __init__(
        self,
        model: PeftModel,
        base: SharedBase,
        settings: TrainerSettings,
        rng: dict[str, Tensor],
        peers: Collective,
    ) -> None:
        self.base = base.identity
        self._peers = peers
        self._model = model
        self._settings = settings
        self._rng = rng
        self._device = device_of(settings)
        self.learning_rate = learning_rate_of(settings, base_parameters(model))
        self._residence = None if base.host is None else Residence(model, base.host)
        lockstep = Lockstep(peers) if base.is_sharded else Free()
        lockstep.anyone(True)  # all have loaded their share before the first pass
        with self._present():
            backend_of(settings).made_ready(model, settings)
            budget = memory.budget_of(base.identity, settings)
            self._reading = Reading(model, settings, budget, base.proofs, lockstep)
        self._loss_scale = HALF_LOSS_SCALE if model.dtype == torch.float16 else 1.0
        self._objective = Objective(model, self._reading, settings, self._loss_scale)
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._gradient = Accumulation(self._objective, self._reading, self._trained.values())
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=self.learning_rate, weight_decay=settings.weight_decay
        )
        if self._residence is not None:
            self._residence.with_optimizer(self._optimizer)

    @classmethod
    @memory.needed_to("load the model")
    def fresh(cls, model_path: str | Path, settings: TrainerSettings, seed: int, peers: Collective = ALONE) -> Self:
        """Return version 0: a LoRA on every linear layer but the head, with an optimizer and RNG.

        The LoRA changes nothing yet. Sets torch's thread count for the process.

        Raises:
            ModelUnusable: the base model cannot be loaded.
        """
        torch.set_num_threads(settings.threads)
        device, backend = device_of(settings), backend_of(settings)
        base = shared_base(model_path, settings, device)
        modules = base.modules(device)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
        )
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            torch.manual_seed(seed)
            model = backend.adapted(modules, config, settings)
            return cls(model, base, settings, _read_rng(device), peers)

    @classmethod
    @memory.needed_to("load the model")
    def resume(
        cls, model_path: str | Path, adapter_folder: Path, settings: TrainerSettings, peers: Collective = ALONE
    ) -> Self:
        """Return the learner that wrote the folder.

        On the CPU, with as many threads, its next step is the same bit for bit.

        Sets torch's thread count for the process. The learning rate comes from the settings, not from the folder. The
        optimizer starts anew where retention has removed its state from the folder. A folder that was pulled from an
        adapter store has neither that nor a random state; then this process's goes on.

        Raises:
            ModelUnusable: the base model cannot be loaded.
            AdapterDamaged: the folder's contents are not what was written.
            AdapterMismatch: it belongs to another base model, or its rank or alpha differs from the settings.
        """
        verify(adapter_folder)
        torch.set_num_threads(settings.threads)
        device, backend = device_of(settings), backend_of(settings)
        base = shared_base(model_path, settings, device)
        config = _checked_config(adapter_folder, base.identity, settings)
        config.inference_mode = False
        config.base_model_name_or_path = None  # peft warns of a name that is not a path; the hashes were compared
        state = adapter_folder / RNG_STATE
        rng = _read_rng(device) if is_pulled(adapter_folder) else safetensors.torch.load_file(state)
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            model = backend.adapted(base.modules(device), config, settings)
            learner = cls(model, base, settings, rng, peers)
        learner._load(adapter_folder)
        return learner

    @memory.needed_to("take a step")
    @_on_device
    def step(
        self,
        rows: Sequence[Row],
        version_in: int,
        on_progress: Callable[[int, int], None] | None = None,
        kind: Kind = "grpo",
        reference: Path | None = None,
    ) -> StepFigures:
        """Make the step's optimizer updates, each from a part of the rows, or none of them.

        `version_in` is the version that this learner holds: the tokens that it sampled are fresh. `on_progress` is
        called with (micro-batches done, micro-batches in all) after each; if it raises, the step ends and no weight has
        moved. `kind` is `sft` for rows of answers to imitate; those have no inference logprobs. A step of the kind
        `grpo` may have such rows beside its own (`Row.replayed`), which count in no figure but the loss and the tokens
        that are read. `reference` is the adapter that preferences (`kto`, `dpo`), and `hindsight` with a fixed teacher,
        go by; None: the base model. A micro-batch whose memory runs out is cut into smaller ones.

        Raises:
            RowError: no row has a sampled token, a row begins with one, or one was constrained and is not measured.
            NotFinite: the loss or the gradient is NaN or infinite; no weight has moved.
            RowsDoNotFit: rows do not fit into memory even alone; no weight has moved.
            OutOfMemory: memory runs out all the same. If that is in the update, drop this learner: it may have begun.
            PeerFailed: another process of the step failed; no weight has moved.
            AdapterDamaged, AdapterMismatch: the reference cannot be read; no weight has moved.
        """
        rows = [row for row in rows if any(row.sampled_T)]
        if all(row.replayed for row in rows):
            raise RowError("no row has a sampled token: there is nothing to learn from")
        if not all(span.measured for row in rows for span in row.constrained):
            raise RowError("a row has constrained tokens that were not measured")
        parts = updates.of_step(rows, kind, self._settings)
        budget = self._reading.budget
        if self._probes and not budget.probed:
            self._gradient.probe(self._settings.max_row_tokens)
        budget.lower(min(self._peers.exchange(budget.tokens)))  # equal plans need equal budgets
        plans = [self._plan(part) for part in parts]
        done: list[Terms] = []
        summed: list[Sums] = []
        norms: list[float] = []
        # One update moves nothing before it has its whole gradient; several need a way back.
        with updates.all_or_none(self._optimizer) if len(parts) > 1 else nullcontext():
            try:
                with self._own_rng():
                    for place, (part, plan) in enumerate(zip(parts, plans, strict=True)):
                        before, rounds = sum(map(len, plans[:place])), sum(map(len, plans))
                        terms = self._terms(part, version_in, kind, reference)
                        done.append(terms)
                        summed.append(self._add_up(terms, plan, before, rounds, on_progress))
                        norms.append(self._update(summed[-1].loss if terms.loss is None else terms.loss, kind))
                        self._optimizer.zero_grad(set_to_none=True)
            finally:
                self._optimizer.zero_grad(set_to_none=True)
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # vLLM may share the device, and needs the memory next
        rate = self._optimizer.param_groups[0]["lr"]
        return figures_of(done, summed, grad_norm=max(norms), learning_rate=rate)

    def must_measure(self, rows: Sequence[Row]) -> bool:
        """Return whether `measure` has to see the rows before `step`."""
        return any(row.constrained for row in rows)

    @memory.needed_to("measure what constraints allowed")
    @_on_device
    def measure(
        self,
        rows: Sequence[Row],
        version_in: int,
        adapters: Mapping[int, Path | None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> MeasuredRows:
        """Return the rows without the tokens that constraints decided, ready for `step`.

        What a truncation or a grammar allowed is measured with the weights that sampled the tokens: this learner's own
        for `version_in`, else those in `adapters` (version -> folder; None for the base model). Where these cannot be
        read, trajectories are left out. Weights, optimizer and RNG stay as they are. `on_progress` is as in `step`, for
        each version.
        """
        measures = static_measures(rows, self._reading.ends)
        by_version: dict[int, list[tuple[int, ConstrainedSpan]]] = {}
        for place, span, version in spans_to_measure(rows):
            by_version.setdefault(version, []).append((place, span))
        for version, spans in sorted(by_version.items()):
            if version != version_in and version not in adapters:
                continue
            try:
                with nullcontext() if version == version_in else self.as_version(adapters[version]):
                    read = partial(measuring.measure, self._reading, rows, spans, on_progress)
                    measures |= memory.within(self._reading.budget, read)
            except (AdapterMismatch, AdapterDamaged) as error:
                log.warning("what constraints allowed to version %d cannot be measured: %s", version, error)
        return without_decided(rows, measures)

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the logprob in nats of each of `token_ids` after its prefix, at temperature 1, with this LoRA.

        vLLM may have the device meanwhile: with `trainer.offload`, layers pass through it one by one.
        """
        return self.logprobs_of([Answer("", tuple(prompt_ids), tuple(token_ids))])[0]

    @torch.no_grad()
    def logprobs_of(self, answers: Sequence[Answer]) -> list[list[float]]:
        """Return `logprobs` of each answer; many are read in one forward pass."""
        if not all(answer.prompt_ids and answer.token_ids for answer in answers):
            raise RowError("logprobs need a prompt and at least one token")
        rows = [row for answer in answers for row in rows_for_sft("", [answer])]
        logprobs: dict[int, list[float]] = {}
        with nullcontext() if self._residence is None else self._residence.passing():
            for places in self._reading.plan(rows):
                batch = self._reading.batch([rows[place] for place in places], [1.0] * len(places))
                lengths = [len(answers[place].token_ids) for place in places]
                each = self._reading.read(batch).logprobs_S.split(lengths)
                logprobs |= {place: logprobs_S.tolist() for place, logprobs_S in zip(places, each, strict=True)}
        return [logprobs[place] for place in range(len(answers))]

    def files(self) -> Mapping[str, bytes]:
        """Return the adapter as vLLM and peft load it, and what `resume` needs in addition: file name -> contents."""
        optimizer = {
            f"{key}.{name}": value
            for name, weight in self._trained.items()
            for key, value in self._optimizer.state[weight].items()
        }
        return {
            ADAPTER_WEIGHTS: _pack(get_peft_model_state_dict(self._model, save_embedding_layers=False)),
            ADAPTER_CONFIG: self._adapter_config(),
            OPTIMIZER_STATE: _pack(optimizer),
            RNG_STATE: _pack(self._rng),
        }

    def before_passes(self, announce: Callable[[], None]) -> None:
        """Have `announce` called before each pass, where the base is sharded: others have to take part in it."""
        self._reading.lockstep.announce = announce

    def accompany(self) -> None:
        """Take part in a forward pass of the leading process, where the base is sharded."""
        self._reading.accompany()

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer."""
        return self._reading.ends

    @property
    def quantisation(self) -> Quantisation:
        """How the base model's linear layers are quantised here."""
        return self._settings.quantisation

    @property
    def _probes(self) -> bool:
        """Whether the largest micro-batch is tried before the first step of this process."""
        wanted = self._settings.probe_memory
        if self._reading.lockstep.is_sharded:
            return False  # where memory runs out in one process, others wait for its layers
        return self._device.type != "cpu" if wanted is None else wanted

    def _present(self) -> AbstractContextManager[None]:
        """Have the weights on the device inside the context; see `Residence`."""
        return nullcontext() if self._residence is None else self._residence.present()

    def _terms(self, rows: Sequence[Row], version_in: int, kind: Kind, reference: Path | None) -> Terms:
        """Return what is fixed of an update before its first backward pass."""
        if kind == "hindsight":
            follows = self._settings.hindsight_teacher == "self"
            with nullcontext() if follows else self.as_version(reference):
                targets = beforehand.targets(self._reading, self._peers, rows, self._settings)
            return self._objective.terms(rows, version_in, kind, targets=targets)
        if kind == "distill":
            return self._objective.terms(rows, version_in, kind, targets=[given_targets(row) for row in rows])
        if kind not in PREFERENCES:
            return self._objective.terms(rows, version_in, kind)
        policy_R = beforehand.row_logprobs(self._reading, self._peers, rows)
        with self.as_version(reference):
            reference_R = beforehand.row_logprobs(self._reading, self._peers, rows)
        preference = preference_loss(rows, policy_R, reference_R, kind, self._settings)
        return self._objective.terms(rows, version_in, kind, preference)

    def _plan(self, rows: Sequence[Row]) -> Plan:
        """Return this process's micro-batches."""
        return self._peers.share(
            self._reading.plan(rows), lambda places: self._reading.tokens([rows[place] for place in places])
        )

    def _add_up(
        self, terms: Terms, plan: Plan, done: int, rounds: int, on_progress: Callable[[int, int], None] | None
    ) -> Sums:
        """Leave the gradient of an update in the weights, and return its sums. `done` of the step's micro-batches are.

        Raises:
            RowsDoNotFit: see `step`.
        """
        sums = Sums()
        for number, places in enumerate(plan, done + 1):
            unfit = self._gradient.add(terms, places, sums) if places else self._gradient.accompany()
            if on_progress:
                on_progress(number, rounds)
            if unfit := list(chain.from_iterable(self._peers.exchange(unfit))):
                raise RowsDoNotFit(frozenset(terms.rows[place].trajectory_id for place in unfit))
        return Sums(*self._peers.add_up(list(self._trained.values()), astuple(sums)))

    def _update(self, loss: float, kind: Kind) -> float:
        """Clip the gradient and run the optimizer. Return the norm before clipping."""
        gradients = [weight.grad for weight in self._trained.values() if weight.grad is not None]
        for gradient in gradients:
            gradient.div_(self._loss_scale)
        grad_norm = get_total_norm(gradients)
        # One sum is enough: NaN and infinity survive addition.
        if not torch.isfinite(grad_norm + loss):
            raise NotFinite(f"loss {loss}, gradient norm {grad_norm.item()}: the step was not taken")
        clip_grads_with_norm_(self._trained.values(), self._settings.clip_norm, grad_norm)
        rate = updates.learning_rate(
            self._settings, self.learning_rate, kind, updates.updates_of(self._optimizer, kind)
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        updates.take(self._optimizer, kind)
        return grad_norm.item()

    @contextmanager
    def _own_rng(self) -> Iterator[None]:
        """Draw from this learner's RNG, and leave the process's RNG unchanged."""
        with torch.random.fork_rng(devices=_cuda_devices(self._device)):
            torch.set_rng_state(self._rng["cpu"])
            if "cuda" in self._rng and self._device.type == "cuda":
                torch.cuda.set_rng_state(self._rng["cuda"], self._device)
            yield
            self._rng = _read_rng(self._device)

    def _adapter_config(self) -> bytes:
        config: dict[str, Any] = self._model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": self.base.name, "inference_mode": True}
        # Sets have no order, but the same adapter must give the same bytes.
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return json.dumps(plain, indent=1, sort_keys=True).encode() + b"\n"

    def _load(self, folder: Path) -> None:
        """Load weights and optimizer state from the folder."""
        self._load_weights(folder)
        if not (folder / OPTIMIZER_STATE).exists():
            log.warning("%s has no optimizer state any more: AdamW starts with new moments", folder.name)
            return
        state = safetensors.torch.load_file(folder / OPTIMIZER_STATE)
        for name, weight in self._trained.items():
            for key in ("step", "exp_avg", "exp_avg_sq", updates.KIND):
                if (value := state.get(f"{key}.{name}")) is not None:
                    # AdamW counts steps on the CPU; the moments are on the device of their weight.
                    self._optimizer.state[weight][key] = value.to(weight.device) if key.startswith("exp") else value

    def _load_weights(self, folder: Path) -> None:
        weights = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
        own = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in own.items()}:
            raise AdapterMismatch(f"{folder / ADAPTER_WEIGHTS}: not the layers of this base model")
        set_peft_model_state_dict(self._model, weights)

    @contextmanager
    def as_version(self, adapter_folder: Path | None) -> Iterator[None]:
        """Have the weights of that adapter inside the context; None: the base model without an adapter.

        Raises:
            AdapterDamaged, AdapterMismatch: see `resume`; the weights are this learner's own again.
        """
        if adapter_folder is None:
            with self._model.disable_adapter():
                yield
            return
        verify(adapter_folder)
        _checked_config(adapter_folder, self.base, self._settings)
        with self._weights_restored():
            self._load_weights(adapter_folder)
            yield

    @contextmanager
    def doubled(self) -> Iterator[None]:
        """Have twice the LoRA inside the context: twice as far from the base model."""
        with self._weights_restored():
            with torch.no_grad():
                for name, weight in self._trained.items():
                    if "lora_B" in name:
                        weight.mul_(2)
            yield

    @contextmanager
    def _weights_restored(self) -> Iterator[None]:
        """Set the weights back at the end of the context."""
        own = {name: weight.detach().clone() for name, weight in self._trained.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._trained.items():
                    weight.copy_(own[name])


def _checked_config(adapter_folder: Path, base: BaseModel, settings: TrainerSettings) -> LoraConfig:
    """Return the adapter's configuration. Raises AdapterDamaged and AdapterMismatch as `Learner.resume` does."""
    check_base(adapter_folder, base)
    config = cast(LoraConfig, LoraConfig.from_pretrained(str(adapter_folder)))
    if (config.r, config.lora_alpha) != (settings.lora_rank, settings.lora_alpha):
        raise AdapterMismatch(
            f"{adapter_folder}: rank {config.r} and alpha {config.lora_alpha}; the settings say "
            f"{settings.lora_rank} and {settings.lora_alpha}. Set them back, or begin a new policy."
        )
    return config


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _read_rng(device: torch.device) -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    return rng


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return cast(bytes, safetensors.torch.save(contiguous, metadata={"format": "pt"}))
