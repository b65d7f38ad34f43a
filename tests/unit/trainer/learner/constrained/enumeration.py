"""A model of six tokens whose every answer can be listed, and what its served policy is, worked out token by token.

Written apart from the trainer: plain loops over ids, in vLLM's order, and autograd.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainer.adapters import files
from trainer.domain.constraints import Constraints
from trainer.domain.rows import Row, SampledCompletion, merge
from trainer.learner.learner import Learner
from trainer.learner.processes.collective import Alone
from whetstone.config.trainer import LossName, TrainerSettings

VOCABULARY, END, TOKENS = 6, 5, 3
PROMPT = (1, 4, 1)
TEMPERATURE = 1.3
SETTINGS = TrainerSettings(
    threads=1, device="cpu", clip_low=1, clip_high=1, tv_regulariser=0, measure_kl=False, learning_rate=0.01,
    max_ratio=1e6, micro_batch_tokens=512,
)  # fmt: skip
"""dppo_tv that masks nothing and pulls nowhere: the bare ratio."""

Grammar = Callable[[tuple[int, ...]], set[int]]
"""What is allowed after the answer so far."""


class Gradients(Alone):
    """Keeps the gradients of a step as they are before the update."""

    gradients: list[Tensor]

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        self.gradients = [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights]
        return super().add_up(weights, figures)


def make_model(folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, eos_token_id=END,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_versions(folder: Path) -> Path:
    """Write the model, and two versions of an adapter that differ from it and from one another."""
    model = make_model(folder / "model")
    learner = Learner.fresh(model, SETTINGS, seed=1)
    answers = [(0, 1, 2), (3, 3, 5), (2, 5), (4, 0, 0)]
    for version in (1, 2):
        rows = [
            row
            for place, answer in enumerate(answers)
            for row in merge(
                str(place), [SampledCompletion("c", PROMPT, answer, (-1.5,) * len(answer), 0, 1.0)], place - 1.5
            )
        ]
        learner.step(rows, 0)
        files.write(folder / f"p@v{version}", learner, parent=version - 1, step=version)
    return folder


def make_grammar(policy: "Policy") -> Grammar:
    """Allow two tokens at the start, then any but the one that is least likely, and anything at last."""
    histories = [(token, 0) for token in range(VOCABULARY)]
    least = {
        history[:1]: int(z_TV[1].argmin()) for history, z_TV in zip(histories, policy.logits(histories), strict=True)
    }

    def grammar(output: tuple[int, ...]) -> set[int]:
        if not output:
            return {0, 2}
        return set(range(VOCABULARY)) - ({least[output]} if len(output) == 1 else set())

    return grammar


def answers() -> list[tuple[int, ...]]:
    """Return every answer: three tokens, or fewer that end with END."""
    whole = itertools.product(range(VOCABULARY), repeat=TOKENS)
    ended = {answer[: answer.index(END) + 1] if END in answer else answer for answer in whole}
    return sorted(ended)


def reward(answer: tuple[int, ...]) -> float:
    return math.sin(7 * sum((place + 2) * token for place, token in enumerate(answer)) + len(answer))


class Policy:
    """A version of the model, with weights that autograd can reach."""

    def __init__(self, folder: Path, version: int) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder / "model")
        self.model = PeftModel.from_pretrained(base, folder / f"p@v{version}", is_trainable=True).eval()
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]

    def logits(self, every: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return, for each answer, the logits (T, V) before each of its tokens."""
        padded = torch.tensor([PROMPT + answer + (0,) * (TOKENS - len(answer)) for answer in every])
        logits_NTV = self.model(input_ids=padded).logits[:, len(PROMPT) - 1 : -1]
        return [logits_TV[: len(answer)] for logits_TV, answer in zip(logits_NTV, every, strict=True)]

    def gradient(self, figure: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(figure, self.weights, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(self.weights, found, strict=True)]


def bent(raw_V: Tensor, output: tuple[int, ...], bending: dict[str, Any]) -> Tensor:
    """Return the logits of one token as vLLM bends them, at TEMPERATURE."""
    z = list(raw_V)
    for token in range(VOCABULARY):
        count = output.count(token)
        if token not in bending.get("allowed_token_ids", range(VOCABULARY)):
            z[token] = torch.tensor(-math.inf)
        if token == END and len(output) < bending.get("min_tokens", 0):
            z[token] = torch.tensor(-math.inf)
        z[token] = z[token] + bending.get("logit_bias", {}).get(str(token), 0.0)
        if count or token in PROMPT:
            penalty = bending.get("repetition_penalty", 1.0)
            z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
        z[token] = z[token] - count * bending.get("frequency_penalty", 0.0)
        if count:
            z[token] = z[token] - bending.get("presence_penalty", 0.0)
    return torch.stack(z) / TEMPERATURE


def left(z_V: Tensor, bending: dict[str, Any]) -> list[int]:
    """Return what min_p, top_k and top_p leave of these logits."""
    order = sorted((token for token in range(VOCABULARY) if z_V[token] > -math.inf), key=lambda token: -z_V[token])
    order = [token for token in order if (z_V[token] - z_V[order[0]]).exp() >= bending.get("min_p", 0.0)]
    order = order[: bending.get("top_k", VOCABULARY)]
    shares = z_V[order].softmax(0).tolist()
    return [token for place, token in enumerate(order) if sum(shares[:place]) < bending.get("top_p", 1.0)]


@dataclass(frozen=True)
class Token:
    """One token of an answer as the served policy weighs it."""

    z_V: Tensor
    support: list[int]
    token: int

    @property
    def served(self) -> Tensor:
        """Its log probability on the support."""
        return self.z_V[self.token] - self.z_V[self.support].logsumexp(0)

    @property
    def raw(self) -> Tensor:
        """Its log probability without a grammar."""
        return self.z_V.log_softmax(0)[self.token]

    @property
    def mass(self) -> Tensor:
        """The share of the probability that the support has."""
        return self.z_V.log_softmax(0)[self.support].logsumexp(0).exp()

    def on(self, support: list[int]) -> "Token":
        return Token(self.z_V, support, self.token)


def weigh(
    policy: Policy, every: Sequence[tuple[int, ...]], bending: dict[str, Any], grammar: Grammar | None = None
) -> list[list[Token]]:
    """Return every answer, token by token."""
    weighed = []
    for answer, logits_TV in zip(every, policy.logits(every), strict=True):
        tokens = []
        for place, token in enumerate(answer):
            z_V = bent(logits_TV[place], answer[:place], bending)
            support = left(z_V, bending) if grammar is None else sorted(grammar(answer[:place]))
            tokens.append(Token(z_V, support, token))
        weighed.append(tokens)
    return weighed


def rows_of(
    every: Sequence[tuple[int, ...]],
    weighed: Sequence[Sequence[Token]],
    constraints: dict[str, Any] | None,
    version: int,
    advantage: Callable[[tuple[int, ...]], float] = reward,
) -> list[Row]:
    """Return a row for each answer, whose advantage has the answer's probability in it: their sum is the mean."""
    rows = []
    for answer, tokens in zip(every, weighed, strict=True):
        logprobs = tuple(token.served.item() for token in tokens)
        completion = SampledCompletion(
            str(answer), PROMPT, answer, logprobs, version, TEMPERATURE, constraints and Constraints.of(constraints)
        )
        rows += merge(str(answer), [completion], math.exp(math.fsum(logprobs)) * advantage(answer))
    return rows


def possible(
    every: Sequence[tuple[int, ...]], weighed: Sequence[Sequence[Token]]
) -> tuple[list[tuple[int, ...]], list[Sequence[Token]]]:
    """Return the answers that the served policy can give."""
    pairs = [
        (answer, tokens)
        for answer, tokens in zip(every, weighed, strict=True)
        if all(token.token in token.support for token in tokens)
    ]
    return [answer for answer, _ in pairs], [tokens for _, tokens in pairs]


def step_gradient(
    folder: Path,
    version: int,
    rows: Sequence[Row],
    adapters: dict[int, Path | None] | None = None,
    loss: LossName = "dppo_tv",
) -> list[Tensor]:
    """Return the gradient by which the trainer raises the mean reward, with its normaliser taken out."""
    peers, settings = Gradients(), SETTINGS.model_copy(update={"loss": loss})
    learner = Learner.resume(folder / "model", folder / f"p@v{version}", settings, peers)
    measured = learner.measure(rows, version, adapters or {}).rows
    tokens = [sum(row.sampled_T) for row in measured]
    if loss in ("grpo", "gspo"):
        normalisers = [float(len(measured) * count) for count in tokens]
    else:
        normaliser = len(measured) * settings.max_answer_tokens if loss == "dr_grpo" else sum(tokens)
        normalisers = [float(normaliser)] * len(measured)
    weighed = [
        replace(row, advantages_T=tuple(advantage * by for advantage in row.advantages_T))
        for row, by in zip(measured, normalisers, strict=True)
    ]
    learner.step(weighed, 0)
    return [-gradient for gradient in peers.gradients]


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def size(gradient: Sequence[Tensor]) -> float:
    return max(g.abs().max().item() for g in gradient)
