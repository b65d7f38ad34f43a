"""A policy that is served under a constraint learns from it as well as one that is sampled freely.

The toy of `test_learning`, smaller. Each arm is measured under the constraint that it is served with.
"""

import functools
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.domain.advantages import group_relative
from trainer.domain.constraints import Constraints
from trainer.domain.rows import SampledCompletion, merge
from trainer.learner.constrained import supports
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

GROUPS, MEMBERS, TOKENS, STEPS, EVALUATED = 8, 8, 12, 40, 1024
SETTINGS = TrainerSettings(threads=1, device="cpu", learning_rate=3e-3, measure_kl=False)
FORCED = 3
"""Of the grammar: every third token is a certain one, and any goes between."""
Numbers = tuple[Any, ...]


@dataclass(frozen=True)
class Serving:
    """How the policy is served."""

    constraints: Constraints | None = None
    forces: bool = False
    """Whether every third token is a certain one: by a grammar, or, without constraints, as part of the prompt."""

    def is_free(self, place: int) -> bool:
        return not self.forces or place % FORCED != 0

    @property
    def control(self) -> "Serving":
        """Return the unconstrained way to be sampled that has as many free tokens."""
        return Serving(None, self.forces)

    def completions(self, name: str, prompt: Numbers, answer: Numbers, logprobs: Numbers) -> list[SampledCompletion]:
        """Return what a trajectory is made of: one completion, or one for each stretch between forced tokens."""
        cuts = [0, len(answer)]
        if self.forces and self.constraints is None:
            cuts = [
                1,
                *(cut for place in range(FORCED, len(answer), FORCED) for cut in (place, place + 1)),
                len(answer),
            ]
        return [
            SampledCompletion(
                f"{name}-{start}", (*prompt, *answer[:start]), answer[start:end], logprobs[start:end], 0, 1.0,
                self.constraints,
            )
            for start, end in zip(cuts[::2], cuts[1::2], strict=True)
        ]  # fmt: skip

    def logprobs(self, logits_BV: Tensor, counts_BV: Tensor, place: int) -> Tensor:
        """Return the log probabilities that tokens number `place` are drawn with."""
        c = self.constraints or Constraints()
        z_BV = logits_BV - c.frequency_penalty * counts_BV - c.presence_penalty * (counts_BV > 0)
        allowed_BV = supports.support(z_BV, c)
        if not self.is_free(place):
            allowed_BV = torch.zeros_like(allowed_BV)
            allowed_BV[:, (7 * place + 5) % allowed_BV.shape[1]] = True
        return z_BV.masked_fill(~allowed_BV, -math.inf).log_softmax(-1)


SERVED = {
    "top_p": Serving(Constraints(top_p=0.9)),
    "top_k": Serving(Constraints(top_k=20)),
    "penalty": Serving(Constraints(frequency_penalty=0.3, presence_penalty=0.3)),
    "grammar": Serving(Constraints(grammar="response_format"), forces=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def random_model(base: Path, folder: Path, seed: int) -> Path:
    config = AutoConfig.from_pretrained(base, initializer_range=0.3)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / f"model-{seed}")
    return folder / f"model-{seed}"


@torch.no_grad()
def sample(model: torch.nn.Module, prompts_BP: Tensor, serving: Serving) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, T) after each prompt, and the logprobs that they were drawn with."""
    next_BT, cache = prompts_BP, None
    tokens, logprobs = [], []
    counts_BV = torch.zeros(len(prompts_BP), 64)
    for place in range(TOKENS):
        read = model(input_ids=next_BT, past_key_values=cache, use_cache=True)
        cache = read.past_key_values
        logprobs_BV = serving.logprobs(read.logits[:, -1], counts_BV, place)
        next_BT = torch.multinomial(logprobs_BV.exp(), 1)
        tokens.append(next_BT)
        logprobs.append(logprobs_BV.gather(1, next_BT))
        counts_BV.scatter_add_(1, next_BT, torch.ones(len(next_BT), 1))
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def rewards(tokens_BT: Tensor, serving: Serving) -> list[float]:
    """Return the share of even tokens among those that the policy chose."""
    free_T = torch.tensor([serving.is_free(place) for place in range(tokens_BT.shape[1])])
    return (tokens_BT[:, free_T] % 2 == 0).float().mean(1).tolist()


@functools.cache
def train(model: Path, seed: int, serving: Serving) -> tuple[torch.nn.Module, float]:
    """Train on what the policy says as it is served; return it, and the share of tokens that were decided."""
    rng = random.Random(seed)
    learner = Learner.fresh(model, SETTINGS, seed)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16, lora_alpha=32)
    speaker: PeftModel = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).eval()
    decided = read = 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(STEPS):
            set_peft_model_state_dict(speaker, safetensors.torch.load(learner.files()["adapter_model.safetensors"]))
            prompts_BP = prompts(rng, GROUPS).repeat_interleave(MEMBERS, 0)
            tokens_BT, logprobs_BT = sample(speaker, prompts_BP, serving)
            gains = rewards(tokens_BT, serving)
            advantages = group_relative(
                {str(g): {str(g * MEMBERS + m): gains[g * MEMBERS + m] for m in range(MEMBERS)} for g in range(GROUPS)}
            ).by_trajectory
            rows = []
            for name, advantage in advantages.items():
                ids = (prompts_BP[int(name)], tokens_BT[int(name)], logprobs_BT[int(name)])
                prompt, answer, logprobs = (tuple(one.tolist()) for one in ids)
                rows += merge(name, serving.completions(name, prompt, answer, logprobs), advantage)
            if not rows:
                break
            measured = learner.measure(rows, 0, {})  # each step samples anew: all tokens are its own
            decided += sum(measured.decided.values())
            read += measured.tokens
            assert measured.disagreements <= 0.001 * measured.tokens  # sampler and trainer add up in another order
            learner.step(measured.rows, 0)
    set_peft_model_state_dict(speaker, safetensors.torch.load(learner.files()["adapter_model.safetensors"]))
    return speaker, decided / max(1, read)


def prompts(rng: random.Random, count: int) -> Tensor:
    return torch.tensor([[rng.randrange(64) for _ in range(4)] for _ in range(count)])


def served_reward(model: torch.nn.Module, serving: Serving) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        tokens_BT, _ = sample(model, prompts(random.Random(1), EVALUATED), serving)
    return statistics.mean(rewards(tokens_BT, serving))


def compare(base: Path, folder: Path, seed: int, serving: Serving) -> dict[str, Any]:
    """Return the rewards under the constraint: before training, of the policy that it trained, of its control."""
    model = random_model(base, folder, seed)
    bent, decided = train(model, seed, serving)
    free, _ = train(model, seed, serving.control)
    start = served_reward(AutoModelForCausalLM.from_pretrained(model).eval(), serving)
    return {
        "start": start, "bent": served_reward(bent, serving), "free": served_reward(free, serving), "decided": decided,
    }  # fmt: skip


def interval(name: str, results: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the paired difference, and print it with the figures."""
    gaps = [one["bent"] - one["free"] for one in results]
    mean, half = statistics.mean(gaps), 2.262 * statistics.stdev(gaps) / math.sqrt(len(gaps))  # t of ten pairs
    means = {key: round(statistics.mean(one[key] for one in results), 4) for key in results[0]}
    print(name, means, f"difference {mean:+.4f} ± {half:.4f}")  # noqa: T201
    return mean - half, mean + half


@pytest.mark.slow
def test_a_policy_learns_from_how_it_is_served(folder: Path, tiny_model: Path) -> None:
    result = compare(tiny_model, folder, 14, SERVED["grammar"])
    assert result["decided"] == pytest.approx(1 / FORCED)
    assert result["bent"] >= result["start"] + 0.25
    assert abs(result["bent"] - result["free"]) <= 0.03


@pytest.mark.long(part="exact")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SERVED)
def test_ten_paired_seeds_learn_as_much_as_without_the_constraint(name: str, folder: Path, tiny_model: Path) -> None:
    low, high = interval(name, [compare(tiny_model, folder, seed, SERVED[name]) for seed in range(10)])
    assert -0.03 <= low <= high <= 0.03
