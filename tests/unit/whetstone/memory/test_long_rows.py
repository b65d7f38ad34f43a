"""What a step allocates grows with the tokens of its rows, not with their square."""

import pytest
import torch

from benchmarks.memory.long_rows import SHAPE, rows
from benchmarks.memory.measured import traced
from trainer.learner import attention
from trainer.learner.prefix_trees import forest, ids


def allocated(kind: str, tokens: int) -> int:
    wood = forest([ids(one.token_ids_T) for one in rows(kind, tokens)])
    assert len(wood.token_ids_T) == tokens
    tree = attention.tree_of(wood, "segments", torch.device("cpu"))
    return traced(SHAPE, tree, tokens)[0]


@pytest.mark.parametrize("kind", ["row", "fork"])
def test_twice_the_tokens_take_at_most_twice_the_memory(kind: str) -> None:
    short, long = (allocated(kind, tokens) for tokens in (8192, 16384))
    assert 1.8 * short < long < 2.02 * short


@pytest.mark.long(part="exact")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["row", "fork"])
def test_128k_tokens_take_at_most_16_times_the_memory_of_8k(kind: str) -> None:
    assert allocated(kind, 2**17) < 16.2 * allocated(kind, 2**13)
