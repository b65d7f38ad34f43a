"""The whole way from sampling to a better policy, without a server: the adapter that was written is what speaks."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.adapters import files
from trainer.domain.advantages import group_relative
from trainer.domain.rows import SampledCompletion, merge
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

GROUPS, MEMBERS, TOKENS, STEPS = 12, 8, 12, 40
Rewarding = Callable[[list[float], random.Random], list[float]]


MORE = pytest.mark.long(part="exact")
SEEDS = (14, pytest.param(6, marks=MORE), pytest.param(25, marks=MORE))
"""Of 30 seeds, those whose random model begins below 0.45."""


@pytest.fixture(scope="session", params=SEEDS)
def seeded_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A random Qwen3 like `tiny_model`, of larger weights so that it prefers some tokens; and its seed."""
    config = AutoConfig.from_pretrained(request.getfixturevalue("tiny_model"), initializer_range=0.3)
    folder = tmp_path_factory.mktemp("seeded") / "tiny-qwen3"
    with torch.random.fork_rng():
        torch.manual_seed(request.param)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder, request.param


def shuffled(rewards: list[float], rng: random.Random) -> list[float]:
    return rng.sample(rewards, len(rewards))


def sample(model: torch.nn.Module, prompts_BP: torch.Tensor, version: int) -> list[SampledCompletion]:
    """TOKENS tokens after each prompt, at temperature 1."""
    ids_BT = prompts_BP
    logprobs = []
    with torch.no_grad():
        for _ in range(TOKENS):
            logprobs_BV = model(input_ids=ids_BT).logits[:, -1].log_softmax(-1)
            next_B1 = torch.multinomial(logprobs_BV.exp(), 1)
            logprobs.append(logprobs_BV.gather(1, next_B1))
            ids_BT = torch.cat([ids_BT, next_B1], 1)
    spoken_BT = ids_BT[:, prompts_BP.shape[1] :]
    return [
        SampledCompletion(str(place), tuple(prompt), tuple(tokens), tuple(logprob), version, 1.0)
        for place, (prompt, tokens, logprob) in enumerate(
            zip(prompts_BP.tolist(), spoken_BT.tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        )
    ]


def learn(seeded_model: tuple[Path, int], adapters: Path, rewarding: Rewarding) -> tuple[float, float]:
    """Train on the share of even tokens, as `rewarding` bends it. Returns that share at the start and at the end."""
    model, seed = seeded_model
    rng = random.Random(seed)
    torch.manual_seed(seed)
    learner = Learner.fresh(model, TrainerSettings(threads=1, device="cpu", learning_rate=3e-3), seed)
    speaker: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model).eval()
    shares = []
    for step in range(STEPS + 1):
        prompts_GP = torch.tensor([[rng.randrange(64) for _ in range(4)] for _ in range(GROUPS)])
        spoken = sample(speaker, prompts_GP.repeat_interleave(MEMBERS, 0), step)
        rewards = [statistics.mean(token % 2 == 0 for token in completion.token_ids) for completion in spoken]
        shares.append(statistics.mean(rewards))
        if step == STEPS:
            break
        bent = rewarding(rewards, rng)
        advantages = group_relative(
            {str(g): {str(g * MEMBERS + m): bent[g * MEMBERS + m] for m in range(MEMBERS)} for g in range(GROUPS)}
        ).by_trajectory
        rows = [row for name, a in advantages.items() for row in merge(name, [spoken[int(name)]], a)]
        if not rows:
            break  # every group is of one mind: nothing is left to learn
        figures = learner.step(rows, step)
        assert figures.mismatch_k3 is not None and figures.mismatch_k3 < 1e-6
        folder = adapters / f"toy@v{step + 1}"
        files.write(folder, learner, parent=step, step=step + 1)
        speaker = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).eval()
    return shares[0], shares[-1]


@pytest.mark.slow
def test_a_toy_policy_learns_what_is_rewarded(tmp_path: Path, seeded_model: tuple[Path, int]) -> None:
    start, end = learn(seeded_model, tmp_path, lambda rewards, rng: rewards)
    assert start < 0.45
    assert end >= 0.85


@pytest.mark.long(part="exact")
@pytest.mark.slow
def test_a_toy_policy_learns_nothing_from_shuffled_rewards(tmp_path: Path, seeded_model: tuple[Path, int]) -> None:
    start, end = learn(seeded_model, tmp_path, shuffled)
    assert abs(end - start) <= 0.12


@pytest.mark.long(part="exact")
@pytest.mark.slow
def test_a_toy_policy_unlearns_what_is_punished(tmp_path: Path, seeded_model: tuple[Path, int]) -> None:
    start, end = learn(seeded_model, tmp_path, lambda rewards, rng: [-reward for reward in rewards])
    assert end <= start - 0.3
