"""One policy in training: the base model, its LoRA, the LoRA's AdamW and RNG. The only file with a model in it.

Knows rows and settings; nothing of groups, rewards, tables, vLLM or where adapters are kept. Whatever raises during a
step, the weights, the optimizer and the RNG stand as they stood before it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import safetensors
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from trainer.base import BaseModel, fingerprint
from trainer.batches import by_length
from trainer.errors import AdapterMismatch, ModelUnusable, NotFinite, RowError
from trainer.losses import dppo_tv, entropy, k3, token_logprobs
from trainer.rows import Row
from whetstone import adapters
from whetstone.settings import TrainerSettings

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER_STATE = "optimizer.safetensors"
RNG_STATE = "rng.safetensors"


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step was, measured before its update. Means are over all sampled tokens of the step."""

    loss: float
    kl: float
    """Nats a token: k3 of the policy to the base model."""
    entropy: float
    """Nats a token, at the temperature that was sampled with."""
    mismatch_k3: float | None
    """Nats a token: k3 of the server to the trainer, over tokens of version_in; None without any."""
    fresh_share: float
    """Share of the tokens that version_in spoke."""
    masked_share: float
    """Share of the tokens whose policy term the loss masked out."""
    grad_norm: float
    """Before clipping."""
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """B rows padded on the right to T tokens, and the S sampled tokens in them."""

    token_ids_BT: Tensor
    rows_S: Tensor
    """Row of each sampled token."""
    places_S: Tensor
    """Its place in the row; the hidden state one before predicts it."""
    token_ids_S: Tensor
    inference_logprobs_S: Tensor
    versions_S: Tensor
    temperatures_S: Tensor
    advantages_S: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> Self:
        def padded(lists: list[Tensor]) -> Tensor:
            return pad_sequence(lists, batch_first=True).to(device)

        token_ids_BT = padded([torch.tensor(row.token_ids_T) for row in rows])
        sampled_BT = padded([torch.tensor(row.sampled_T) for row in rows])
        if bool(sampled_BT[:, 0].any()):
            raise RowError("a row begins with a sampled token, which nothing predicts")
        rows_S, places_S = sampled_BT.nonzero(as_tuple=True)
        advantages_B = torch.tensor([row.advantage for row in rows], dtype=torch.float32).to(device)
        return cls(
            token_ids_BT=token_ids_BT,
            rows_S=rows_S,
            places_S=places_S,
            token_ids_S=token_ids_BT[rows_S, places_S],
            inference_logprobs_S=padded([torch.tensor(row.inference_logprobs_T) for row in rows])[rows_S, places_S],
            versions_S=padded([torch.tensor(row.versions_T) for row in rows])[rows_S, places_S],
            temperatures_S=padded([torch.tensor(row.temperatures_T) for row in rows])[rows_S, places_S],
            advantages_S=advantages_B[rows_S],
        )


@dataclass(slots=True)
class _Sums:
    """Sums over the tokens of a step so far."""

    loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    mismatch: float = 0.0
    fresh: float = 0.0
    masked: float = 0.0

    def add(self, sums_6: Tensor) -> None:
        loss, kl, entropy_sum, mismatch, fresh, masked = sums_6.tolist()
        self.loss += loss
        self.kl += kl
        self.entropy += entropy_sum
        self.mismatch += mismatch
        self.fresh += fresh
        self.masked += masked


class Learner:
    """A base model with one LoRA that is being trained. Made by `fresh` or `resume`."""

    def __init__(self, model: PeftModel, base: BaseModel, settings: TrainerSettings, rng: dict[str, Tensor]) -> None:
        self.base = base
        self._model = model
        self._settings = settings
        self._rng = rng
        self._device = model.device
        causal: PreTrainedModel = model.get_base_model()
        self._decoder = causal.base_model
        self._head = causal.get_output_embeddings()
        self._trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=settings.learning_rate, weight_decay=0.0)
        # Without dropout anywhere: the server has none.
        model.eval()
        _prove_head(causal, self._decoder, self._head)

    @classmethod
    def fresh(cls, model_path: str | Path, settings: TrainerSettings, seed: int) -> Self:
        """A LoRA that changes nothing yet on every linear layer but the head; version 0 with what it takes to move.

        Sets torch's thread count for the process.

        Raises:
            ModelUnusable: the base model cannot be loaded.
        """
        model, base, device = _load_base(model_path, settings)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
        )
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            torch.manual_seed(seed)
            return cls(get_peft_model(model, config), base, settings, _read_rng(device))

    @classmethod
    def resume(cls, model_path: str | Path, adapter_folder: Path, settings: TrainerSettings) -> Self:
        """The learner that wrote the folder: on the CPU, with as many threads, its next step is the same bit for bit.

        Sets torch's thread count for the process. The learning rate is the settings', not the folder's.

        Raises:
            ModelUnusable: the base model cannot be loaded.
            AdapterDamaged: the folder is not what was written.
            AdapterMismatch: it belongs to another base model, or has another rank or alpha than the settings.
        """
        adapters.verify(adapter_folder)
        manifest, _ = adapters.read_manifest(adapter_folder)
        model, base, device = _load_base(model_path, settings)
        if differs := base.differs_in(manifest["base_model"]):
            raise AdapterMismatch(f"{adapter_folder}: trained on another base model than {model_path}: {differs}")
        config = cast(LoraConfig, LoraConfig.from_pretrained(str(adapter_folder)))
        if (config.r, config.lora_alpha) != (settings.lora_rank, settings.lora_alpha):
            raise AdapterMismatch(
                f"{adapter_folder}: rank {config.r} and alpha {config.lora_alpha}; the settings say "
                f"{settings.lora_rank} and {settings.lora_alpha}. Set them back, or begin a new policy."
            )
        config.inference_mode = False
        config.base_model_name_or_path = None  # peft warns of a name that is not a path; the hashes were compared
        rng = safetensors.torch.load_file(adapter_folder / RNG_STATE)
        with torch.random.fork_rng(devices=_cuda_devices(device)):
            learner = cls(get_peft_model(model, config), base, settings, rng)
        learner._load(adapter_folder)
        return learner

    def step(
        self, rows: Sequence[Row], version_in: int, on_progress: Callable[[int, int], None] | None = None
    ) -> StepFigures:
        """One optimizer update from all the rows.

        `version_in` is the version that this learner holds: tokens it spoke are the fresh ones. `on_progress` is
        called with (micro-batches done, micro-batches in all) after each, before the update; what it raises ends the
        step with nothing moved.

        Raises:
            RowError: no row has a sampled token, or one begins with it.
            NotFinite: the loss or the gradient is NaN or infinite; nothing has moved.
        """
        rows = [row for row in rows if any(row.sampled_T)]
        step_tokens = sum(sum(row.sampled_T) for row in rows)
        if not step_tokens:
            raise RowError("no row has a sampled token: there is nothing to learn from")
        batches = by_length([len(row.token_ids_T) for row in rows], self._settings.micro_batch_tokens)
        sums = _Sums()
        try:
            with self._own_rng():
                for done, places in enumerate(batches, 1):
                    batch = _MicroBatch.of([rows[place] for place in places], self._device)
                    sums.add(self._accumulate(batch, step_tokens, version_in))
                    if on_progress:
                        on_progress(done, len(batches))
                grad_norm = self._update(sums.loss)
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return StepFigures(
            loss=sums.loss,
            kl=sums.kl / step_tokens,
            entropy=sums.entropy / step_tokens,
            mismatch_k3=sums.mismatch / sums.fresh if sums.fresh else None,
            fresh_share=sums.fresh / step_tokens,
            masked_share=sums.masked / step_tokens,
            grad_norm=grad_norm,
            sampled_tokens=step_tokens,
        )

    @torch.no_grad()
    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Nats of each of `token_ids` after what stands before it, at temperature 1, with the LoRA as it is."""
        if not prompt_ids or not token_ids:
            raise RowError("logprobs need a prompt and at least one token")
        token_ids_BT = torch.tensor([[*prompt_ids, *token_ids]], device=self._device)
        places_S = torch.arange(len(prompt_ids), token_ids_BT.shape[1], device=self._device)
        logits_SV = self._logits(token_ids_BT, torch.zeros_like(places_S), places_S)
        return cast(list[float], token_logprobs(logits_SV, token_ids_BT[0, places_S]).tolist())

    def files(self) -> Mapping[str, bytes]:
        """The adapter as vLLM and peft load it, and what `resume` needs beside it: file name -> contents."""
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

    def _accumulate(self, batch: _MicroBatch, step_tokens: int, version_in: int) -> Tensor:
        """Add the micro-batch's gradient. Returns its sums: loss, kl, entropy, mismatch, fresh, masked."""
        with torch.no_grad(), self._model.disable_adapter():
            base_S = token_logprobs(self._tempered_logits(batch), batch.token_ids_S)
        logits_SV = self._tempered_logits(batch)
        trainer_S = token_logprobs(logits_SV, batch.token_ids_S)
        policy = dppo_tv(
            trainer_S,
            batch.inference_logprobs_S,
            batch.advantages_S,
            threshold=self._settings.tv_threshold,
            regulariser=self._settings.tv_regulariser,
            step_tokens=step_tokens,
        )
        policy.loss.backward()
        with torch.no_grad():
            fresh_S = batch.versions_S == version_in
            return torch.stack(
                [
                    policy.loss.detach(),
                    k3(trainer_S, base_S).sum(),
                    entropy(logits_SV).sum(),
                    k3(batch.inference_logprobs_S, trainer_S)[fresh_S].sum(),
                    fresh_S.sum().float(),
                    policy.masked_S.sum().float(),
                ]
            )

    def _tempered_logits(self, batch: _MicroBatch) -> Tensor:
        return self._logits(batch.token_ids_BT, batch.rows_S, batch.places_S) / batch.temperatures_S[:, None]

    def _logits(self, token_ids_BT: Tensor, rows_S: Tensor, places_S: Tensor) -> Tensor:
        """fp32 logits (S, V) that predict the tokens at (row, place); the head sees no other position.

        There is no attention mask: attention is causal and padding is on the right, so no token ever sees any.
        """
        hidden_BTH = self._decoder(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        return cast(Tensor, self._head(hidden_BTH[rows_S, places_S - 1]).float())

    def _update(self, loss: float) -> float:
        """Clip the gradient and let the optimizer move. Returns the norm before clipping."""
        gradients = [weight.grad for weight in self._trained.values() if weight.grad is not None]
        grad_norm = get_total_norm(gradients)
        # One sum is enough: NaN and infinity survive addition.
        if not torch.isfinite(grad_norm + loss):
            raise NotFinite(f"loss {loss}, gradient norm {grad_norm.item()}: the step was not taken")
        clip_grads_with_norm_(self._trained.values(), self._settings.clip_norm, grad_norm)
        self._optimizer.step()
        return grad_norm.item()

    @contextmanager
    def _own_rng(self) -> Iterator[None]:
        """Draw from this learner's RNG, and leave the process's alone."""
        with torch.random.fork_rng(devices=_cuda_devices(self._device)):
            torch.set_rng_state(self._rng["cpu"])
            if "cuda" in self._rng and self._device.type == "cuda":
                torch.cuda.set_rng_state(self._rng["cuda"], self._device)
            yield
            self._rng = _read_rng(self._device)

    def _adapter_config(self) -> bytes:
        config: dict[str, Any] = self._model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": self.base.name, "inference_mode": True}
        # Sets have no order; the same adapter is to be the same bytes.
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return json.dumps(plain, indent=1, sort_keys=True).encode() + b"\n"

    def _load(self, folder: Path) -> None:
        """Take over weights and optimizer state."""
        weights = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
        own = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        if {name: value.shape for name, value in weights.items()} != {name: value.shape for name, value in own.items()}:
            raise AdapterMismatch(f"{folder / ADAPTER_WEIGHTS}: not the layers of this base model")
        set_peft_model_state_dict(self._model, weights)
        state = safetensors.torch.load_file(folder / OPTIMIZER_STATE)
        for name, weight in self._trained.items():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if (value := state.get(f"{key}.{name}")) is not None:
                    # AdamW counts steps on the CPU; the moments lie beside their weight.
                    self._optimizer.state[weight][key] = value if key == "step" else value.to(weight.device)


def _load_base(model_path: str | Path, settings: TrainerSettings) -> tuple[PreTrainedModel, BaseModel, torch.device]:
    torch.set_num_threads(settings.threads)
    transformers_logging.disable_progress_bar()
    device = _device(settings.device)
    try:
        # Safetensors only: other formats run code when they are read.
        model = AutoModelForCausalLM.from_pretrained(str(model_path), dtype="auto", use_safetensors=True)
        config = cached_file(str(model_path), "config.json")
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelUnusable(f"{model_path}: {error}") from error
    if config is None:
        raise ModelUnusable(f"{model_path}: no config.json")
    return model.to(device), fingerprint(Path(config).parent, Path(model_path).name), device


def _prove_head(causal: PreTrainedModel, decoder: Any, head: Any) -> None:
    """Raise ModelUnusable where logits are more than the head on the last hidden states (capped or scaled ones)."""
    token_ids_BT = torch.arange(8, device=causal.device)[None] % causal.config.get_text_config().vocab_size
    with torch.no_grad():
        theirs = causal(input_ids=token_ids_BT, use_cache=False).logits
        ours = head(decoder(input_ids=token_ids_BT, use_cache=False).last_hidden_state)
    if not torch.allclose(theirs.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise ModelUnusable(f"{type(causal).__name__} does more to its logits than its head; it cannot be trained here")


def _device(wanted: str) -> torch.device:
    if wanted != "auto":
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


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
