"""Attention over a forest, three ways, against attention over each row alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from trainer.learner.attention import QUERIES, RECOMPUTED_FROM, NotAForest, Way, attend, tree_of, way_for, ways_of
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


@st.composite
def woods(draw: st.DrawFn) -> Forest:
    """Up to 2,000 tokens of rows grown from one another, cut anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [rng.integers(50, size=draw(st.integers(1, 400)))]
    for _ in range(draw(st.integers(0, 8))):
        parent = rows[draw(st.integers(0, len(rows) - 1))]
        tail = rng.integers(50, size=draw(st.sampled_from([1, 5, 127, 128, 300])))
        rows.append(np.concatenate([parent[: draw(st.integers(0, len(parent)))], tail]))
    return forest(rows)


def seen_of(wood: Forest) -> Tensor:
    """Bool (T, T), by the definition: what a row has read of itself up to each of its tokens."""
    tokens = len(wood.token_ids_T)
    seen_TT = torch.zeros(tokens, tokens, dtype=torch.bool)
    for row in range(len(wood.last_piece)):
        flat = torch.from_numpy(wood.places(row))
        seen_TT[flat[:, None], flat] |= torch.ones(len(flat), len(flat), dtype=torch.bool).tril()
    return seen_TT


@given(woods())
@settings(max_examples=25, deadline=None)
def test_the_masks_of_dense_and_flex_are_what_rows_see(wood: Forest) -> None:
    seen_TT, tokens = seen_of(wood), len(wood.token_ids_T)
    assert torch.equal(tree_of(wood, "dense", CPU).mask, seen_TT)

    ours = tree_of(wood, "flex", CPU).blocks
    query_T1, key_T = torch.arange(tokens)[:, None], torch.arange(tokens)
    assert torch.equal(ours.mask_mod(torch.tensor(0), torch.tensor(0), query_T1, key_T), seen_TT)
    theirs = create_block_mask(lambda _b, _h, query, key: seen_TT[query, key], None, None, tokens, tokens, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    for name in (*names, *(name.replace("kv", "q") for name in names)):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name


@pytest.fixture(scope="module")
def long_wood() -> Forest:
    """Two rows that fork after more keys than a call keeps for the backward pass, and one that forks again."""
    rng = np.random.default_rng(0)
    trunk, bough, *leaves = (rng.integers(50, size=size) for size in (RECOMPUTED_FROM, 300, 600, 100))
    return forest(
        [np.concatenate([trunk, bough, leaves[0]]), np.concatenate([trunk, bough]), np.concatenate([trunk, leaves[1]])]
    )


def test_what_is_computed_again_for_the_way_back_gives_the_same_gradient(long_wood: Forest) -> None:
    inputs = [one.requires_grad_(True) for one in heads(long_wood)]
    ways: tuple[Way, Way] = ("segments", "dense")
    gradients = []
    for way in ways:
        attended, _ = attend(torch.nn.Identity(), *inputs, None, scaling=0.3, tree=tree_of(long_wood, way, CPU))
        gradients.append(torch.autograd.grad(attended.square().sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_long_fork_keeps_no_copy_of_its_keys(long_wood: Forest) -> None:
    """Seven calls would keep 4,096 keys and more each, for each of the query heads."""
    inputs = [one.requires_grad_(True) for one in heads(long_wood)]
    stored: dict[int, int] = {}

    def store(one: Tensor) -> Tensor:
        stored[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(store, lambda one: one):
        attend(torch.nn.Identity(), *inputs, None, scaling=0.3, tree=tree_of(long_wood, "segments", CPU))
    assert 0 < sum(stored.values()) < 3 * sum(one.nbytes for one in inputs)


def test_all_masks_of_forks_are_parts_of_one(long_wood: Forest) -> None:
    masks = [part.mask for part in tree_of(long_wood, "segments", CPU).parts if part.mask is not None]
    (one,) = {mask.untyped_storage().data_ptr(): mask.untyped_storage() for mask in masks}.values()
    assert len(masks) > 4 and one.nbytes() <= 2 * QUERIES * len(long_wood.token_ids_T)
    for part in tree_of(long_wood, "segments", CPU).parts:
        if part.mask is not None:
            queries, keys = part.mask.shape
            assert torch.equal(part.mask, torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries))


def memory_mib(kind: str) -> float:
    """VmRSS, what this process has in memory, or VmHWM, the most it had since it was last reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) / 1024


def test_flex_takes_little_memory_for_the_mask_of_32k_tokens() -> None:
    trunk, *leaves = np.random.default_rng(0).integers(50, size=(16, 2048))
    wood = forest([np.concatenate([trunk, leaf]) for leaf in leaves])
    assert len(wood.token_ids_T) == 2**15
    tree_of(forest([trunk]), "flex", CPU)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
    before = memory_mib("VmRSS")
    tree_of(wood, "flex", CPU)
    assert memory_mib("VmHWM") - before < 200
