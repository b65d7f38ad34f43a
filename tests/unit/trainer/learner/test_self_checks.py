"""The proof that a model reads forests passes for any draw of tokens, and fails where one token sees too much."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from trainer.learner import attention, self_checks
from trainer.learner.prefix_trees import Forest

WAYS: tuple[attention.Way, ...] = ("segments", "dense")
SEEDS = range(6)


@pytest.fixture(scope="session", params=["fp32", "bf16"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> PreTrainedModel:
    dtype = torch.float32 if request.param == "fp32" else torch.bfloat16
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    return frozen(model)


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a gradient through it, as a LoRA has one, that costs little."""
    model.eval().requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    return model


def prove(model: PreTrainedModel, seed: int, *ways: attention.Way) -> None:
    """Raise NotProven for the first of the ways that is not proven."""
    reference = self_checks.alone(model, "sdpa", seed)
    for way in ways:
        self_checks.forest(model, reference, way)


def sees(wood: Forest, query: int) -> list[int]:
    """The tokens that a token of the forest sees."""
    (piece,) = (at for at, piece in enumerate(wood.pieces) if piece.start <= query < piece.end)
    path = [wood.pieces[at] for at in wood.path(piece)]
    return [at for piece in path for at in range(piece.start, min(piece.end, query + 1))]


@contextmanager
def reading(change: Callable[[int, list[int]], list[int]], query: int, wood: Forest) -> Iterator[None]:
    """Attention in which one token sees what `change` makes of the tokens that it should see."""
    keys = change(query, sees(wood, query))

    def attend(module: Any, query_: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        attended, _ = attention.attend(module, query_, key, value, *args, **kwargs)
        if kwargs.get("tree") is not None:
            key, value = (repeat_kv(one, query_.shape[1] // key.shape[1])[:, :, keys] for one in (key, value))
            one = scaled_dot_product_attention(query_[:, :, [query]], key, value, scale=kwargs["scaling"])
            attended = attended.index_copy(1, torch.tensor([query]), one.transpose(1, 2))
        return attended, None

    AttentionInterface.register(attention.NAME, attend)
    try:
        yield
    finally:
        AttentionInterface.register(attention.NAME, attention.attend)


def a_neighbours_key(seed: int, wood: Forest) -> tuple[int, int]:
    """A token of one row, and one that it must not see: no part of its row."""
    numbers = random.Random(seed)
    query = numbers.randrange(len(wood.token_ids_T))
    own = {at for row in range(3) if query in wood.places(row) for at in wood.places(row).tolist()}
    return query, numbers.choice([at for at in range(len(wood.token_ids_T)) if at not in own])


def forests(model: PreTrainedModel, seed: int) -> list[Forest]:
    return self_checks.alone(model, "sdpa", seed).forests


def test_every_draw_of_tokens_proves_a_model_that_keeps_rows_apart(model: PreTrainedModel) -> None:
    for seed in SEEDS:
        prove(model, seed, *WAYS)


def test_no_draw_of_tokens_proves_a_model_of_which_one_token_sees_one_of_a_neighbours(model: PreTrainedModel) -> None:
    for seed in SEEDS:
        wood = forests(model, seed)[0]
        query, key = a_neighbours_key(seed, wood)
        with reading(lambda _query, seen: [*seen, key], query, wood):  # noqa: B023 (called within the loop)
            for way in WAYS:
                with pytest.raises(self_checks.NotProven, match="one changes with what others say"):
                    prove(model, seed, way)


def test_a_token_that_is_read_by_another_kernel_alone_harms_no_proof(model: PreTrainedModel) -> None:
    """What plants the leaks above is itself no leak."""
    wood = forests(model, 0)[0]
    for query in (0, 70, 191):
        with reading(lambda _query, seen: seen, query, wood):
            prove(model, 0, *WAYS)


@pytest.fixture(scope="session")
def real_model(smollm2: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    return frozen(model)


@pytest.mark.long(part="real")
@pytest.mark.timeout(3600)
def test_a_real_model_in_bf16_is_proven_with_every_draw(real_model: PreTrainedModel) -> None:
    for seed in range(50):
        prove(real_model, seed, *WAYS)


@pytest.mark.long(part="real")
@pytest.mark.timeout(3600)
def test_a_real_model_in_bf16_of_which_one_token_sees_one_of_a_neighbours_is_never_proven(
    real_model: PreTrainedModel,
) -> None:
    for seed in range(50):
        wood = forests(real_model, seed)[0]
        query, key = a_neighbours_key(seed, wood)
        with (
            reading(lambda _query, seen: [*seen, key], query, wood),  # noqa: B023 (called within the loop)
            pytest.raises(self_checks.NotProven, match="one changes with what others say"),
        ):
            prove(real_model, seed, WAYS[seed % 2])


def test_a_model_that_counts_positions_by_itself_is_not_proven(model: PreTrainedModel) -> None:
    """What no comparison of bits sees: rows are read wrongly in the same way whatever the others say."""
    read = model.base_model.forward

    def counting(*args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return read(*args, **kwargs)

    model.base_model.forward = counting
    try:
        for seed in SEEDS:
            with pytest.raises(self_checks.NotProven, match="otherwise than alone"):
                prove(model, seed, "dense")
    finally:
        del model.base_model.forward
