"""Compute a step over one log of calls with our learner and with TRL's own GRPOTrainer, with the same weights.

It uses our learner's private methods, to leave out everything but loss and backward.
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from benchmarks.learning import trl_trainer
from trainer.adapters import files
from trainer.domain.rows import Row, SampledCompletion, merge
from trainer.learner.learner import Learner
from trainer.learner.losses import CLIPS
from whetstone.config.trainer import TrainerSettings

TRAJECTORIES, PROMPT, READ, SAMPLED = 8, 256, 32, 32
"""Trajectories of a group; tokens of their shared prompt, of the new prompt of a later turn, and of each answer."""

OURS, STEP = "ours", "ours, whole step"
CALLS, MERGED = "TRL, row per call", "TRL, merged rows"


@dataclass(frozen=True, slots=True)
class Pass:
    """Loss and backward over a whole step."""

    loss: float
    read_tokens: int
    """Tokens of the forward passes, padding included."""
    gradients: dict[str, Tensor]


def log_of_calls(turns: int, vocabulary: int, seed: int = 0) -> dict[str, list[SampledCompletion]]:
    """Return each trajectory's calls: random ids, logprobs near those of an untrained model."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    prompt = tokens(PROMPT)
    log: dict[str, list[SampledCompletion]] = {}
    for place in range(TRAJECTORIES):
        context = prompt
        for turn in range(turns):
            prompt_ids = context + tokens(READ if turn else 0)
            answer = tokens(SAMPLED)
            logprobs = tuple(min(0.0, -math.log(vocabulary) + rng.gauss(0, 0.2)) for _ in answer)
            log.setdefault(str(place), []).append(
                SampledCompletion(f"{place}.{turn}", prompt_ids, answer, logprobs, 0, 1.0)
            )
            context = prompt_ids + answer
    return log


class Sides:
    """One base model and one adapter, loaded by us and by TRL."""

    def __init__(
        self, folder: Path, vocabulary: int, args: argparse.Namespace, backend: Literal["hf", "unsloth"]
    ) -> None:
        self.device, self.budget = args.device, args.budget
        base, lora = folder / f"base-{vocabulary}", folder / f"adapter-{vocabulary}"
        _save_model(base, vocabulary, args)
        settings = TrainerSettings(
            loss="dapo",
            backend=backend,
            device=args.device,
            threads=args.threads,
            micro_batch_tokens=args.budget,
            gradient_checkpointing=False,
            learning_rate=1e-2,
        )
        first = Learner.fresh(base, settings, seed=0)
        first.step(_merged(log_of_calls(1, vocabulary)), 0)  # or B would be zero, and with it the gradient of A
        files.write(lora, first, parent=0, step=1)
        # A learning rate so small that the weights do not change.
        self.learner = Learner.resume(base, lora, settings.model_copy(update={"learning_rate": 1e-12}))
        self.trl = _trl(base, lora, args.device) if backend == "hf" else None

    def passes(self, log: dict[str, list[SampledCompletion]]) -> dict[str, Callable[[], Pass]]:
        """Return loss and backward over the log for every side, and our whole step."""
        merged = _merged(log)
        calls = [
            row for who, completions in log.items() for one in completions for row in merge(who, [one], _advantage(who))
        ]
        ours = {OURS: lambda: self._ours(merged), STEP: lambda: self._step(merged)}
        if (trl := self.trl) is None:
            return ours
        return {**ours, CALLS: lambda: self._theirs(trl, calls), MERGED: lambda: self._theirs(trl, merged)}

    def _ours(self, rows: list[Row]) -> Pass:
        """Compute a step without its update and its figures (KL to the base is a forward pass of its own)."""
        reading, objective = self.learner._reading, self.learner._objective
        terms = objective.terms(rows, 0, "grpo")
        losses, read_tokens = [], 0
        for places in reading.plan(rows):
            batch = reading.batch([rows[place] for place in places], [terms.weights[place] for place in places])
            read_tokens += batch.token_ids_BT.numel()
            policy = objective.policy_loss(batch, reading.read(batch).logprobs_S, "grpo")
            loss = policy.losses_S @ batch.weights_S
            loss.backward()
            losses.append(loss.detach())
        return Pass(float(sum(losses)), read_tokens, _take(self.learner._model))

    def _step(self, rows: list[Row]) -> Pass:
        figures = self.learner.step(rows, 0)
        return Pass(figures.loss, figures.read_tokens, {})

    def _theirs(self, trl: GRPOTrainer, rows: list[Row]) -> Pass:
        losses, read_tokens = [], 0
        for places in _by_padded_length(rows, self.budget):
            batch = trl_trainer.inputs([rows[place] for place in places], _sampled(rows), self.device)
            read_tokens += batch["prompt_ids"].numel() + batch["completion_ids"].numel()
            loss = trl.compute_loss(trl.model, batch)
            loss.backward()
            losses.append(loss.detach())
        return Pass(float(sum(losses)), read_tokens, _take(trl.model))


def _trl(base: Path, lora: Path, device: str) -> GRPOTrainer:
    """Return TRL's trainer of the same adapter, for the same loss."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto").to(device)
    return trl_trainer.make(
        PeftModel.from_pretrained(model, lora, is_trainable=True),
        device,
        loss_type="dapo",
        beta=0.0,
        epsilon=CLIPS["dapo"][0],
        epsilon_high=CLIPS["dapo"][1],
        temperature=1.0,
    )


def _merged(log: dict[str, list[SampledCompletion]]) -> list[Row]:
    return [row for who, completions in log.items() for row in merge(who, completions, _advantage(who))]


def _advantage(trajectory_id: str) -> float:
    return 1.0 if int(trajectory_id) % 2 else -1.0


def _sampled(rows: Sequence[Row]) -> int:
    return sum(sum(row.sampled_T) for row in rows)


def _take(model: Any) -> dict[str, Tensor]:
    """Return the gradients, and clear those of the model."""
    taken = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def _by_padded_length(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Return row positions, longest first, in micro-batches that stay within the budget as TRL pads them."""
    starts = [row.sampled_T.index(True) for row in rows]
    batches: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: -len(rows[place].token_ids_T)):
        grown = [*batches[-1], place] if batches else [place]
        prompt = max(starts[one] for one in grown)
        answer = max(len(rows[one].token_ids_T) - starts[one] for one in grown)
        if batches and len(grown) * (prompt + answer) <= budget:
            batches[-1] = grown
        else:
            batches.append([place])
    return batches


def _save_model(folder: Path, vocabulary: int, args: argparse.Namespace) -> None:
    heads = max(2, args.hidden // 64)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.to(torch.float32 if args.device == "cpu" else torch.bfloat16).save_pretrained(folder)
