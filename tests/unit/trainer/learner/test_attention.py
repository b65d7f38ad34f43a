"""Attention over a forest, three ways, against attention over each row alone."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.learner.attention import NotAForest, Way, attend, tree_of, way_for, ways_of
from trainer.learner.prefix_trees import Forest, forest

CPU = torch.device("cpu")


@pytest.fixture
def wood() -> Forest:
    """Three rows that begin alike, two of them for longer, and one of its own."""
    rng = np.random.default_rng(0)
    trunk, bough = rng.integers(50, size=60), rng.integers(50, size=40)
    leaves = [rng.integers(50, size=size) for size in (9, 600, 12)]
    rows = [np.concatenate([trunk, bough, leaves[0]]), np.concatenate([trunk, bough, leaves[1]])]
    return forest([*rows, np.concatenate([trunk, leaves[2]]), rng.integers(50, size=30)])


def heads(wood: Forest) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2, 8 wide."""
    generator = torch.Generator().manual_seed(1)
    tokens = len(wood.token_ids_T)
    query, key, value = (torch.randn(1, count, tokens, 8, generator=generator) for count in (4, 2, 2))
    return query, key, value


@pytest.mark.parametrize("way", ["segments", "dense", "flex"])
# Said by flex-attention of itself where it is not compiled, as on the CPU, where it has no way back either.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_token_sees_its_own_row_alone(wood: Forest, way: Way) -> None:
    query, key, value = heads(wood)
    module = torch.nn.Identity()
    attended, weights = attend(module, query, key, value, None, scaling=0.3, tree=tree_of(wood, way, CPU))
    assert weights is None
    assert attended.shape == (1, len(wood.token_ids_T), 4, 8)
    for row in range(4):
        flat = torch.from_numpy(wood.places(row))
        wide = [one[:, :, flat].repeat_interleave(2, dim=1) for one in (key, value)]
        alone = scaled_dot_product_attention(query[:, :, flat], *wide, is_causal=True, scale=0.3)
        torch.testing.assert_close(attended[:, flat], alone.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "asked", [{"sliding_window": 8}, {"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}]
)
def test_what_a_forest_is_not_read_with_is_refused(wood: Forest, asked: dict[str, object]) -> None:
    query, key, value = heads(wood)
    with pytest.raises(NotAForest):
        attend(torch.nn.Identity(), query, key, value, None, tree=tree_of(wood, "segments", CPU), **asked)


def test_the_setting_allows_what_the_device_has() -> None:
    assert ways_of("auto", CPU) == ("segments", "dense")
    assert ways_of("auto", torch.device("cuda")) == ("segments", "dense", "flex")
    assert ways_of("dense", CPU) == ("dense",)


def test_long_forests_are_compiled_and_chains_of_forks_take_a_mask(wood: Forest) -> None:
    long = forest([np.arange(5000)])
    chain = forest([np.arange(40 * depth) for depth in range(1, 60)])
    assert way_for(long, ["segments", "dense", "flex"]) == "flex"
    assert way_for(long, ["segments", "dense"]) == way_for(wood, ["segments", "dense", "flex"]) == "segments"
    assert way_for(chain, ["segments", "dense"]) == "dense"
    assert way_for(chain, ["segments"]) == "segments"
    assert way_for(wood, ["dense"]) == "dense"
    assert way_for(wood, ["flex"]) == "flex"
