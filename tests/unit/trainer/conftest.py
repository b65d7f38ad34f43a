"""A tiny Qwen3 with random weights, and rows to train it on."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.domain.rows import Row

VOCABULARY = 64


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3: hidden 64, 2 layers, 64 tokens."""
    folder = tmp_path_factory.mktemp("base") / "tiny-qwen3"
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,  # the usual 0.02 leaves so small a head that no adapter can prefer half of the tokens
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[Row]]:
    """Random rows of 40 to 60 tokens, a quarter of them sampled, by versions 0 and 1, at two temperatures."""

    def make(count: int, seed: int = 0, shortest: int = 40, longest: int = 60) -> list[Row]:
        rng = random.Random(seed)
        return [_row(rng, str(place), rng.randint(shortest, longest)) for place in range(count)]

    def _row(rng: random.Random, trajectory_id: str, length: int) -> Row:
        sampled = [place > 4 and rng.random() < 0.25 for place in range(length - 1)] + [True]
        return Row(
            trajectory_id=trajectory_id,
            token_ids_T=tuple(rng.randrange(VOCABULARY) for _ in sampled),
            sampled_T=tuple(sampled),
            inference_logprobs_T=tuple(rng.uniform(-5, -3) if here else math.nan for here in sampled),
            versions_T=tuple(rng.choice((0, 1)) if here else -1 for here in sampled),
            temperatures_T=tuple(rng.choice((0.7, 1.0)) if here else 1.0 for here in sampled),
            advantages_T=_weighed(sampled, rng.uniform(-1, 1)),
        )

    return make


def _weighed(sampled: list[bool], advantage: float) -> tuple[float, ...]:
    return tuple(advantage if here else 0.0 for here in sampled)
