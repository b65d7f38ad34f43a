"""Prove before training that our forward pass computes what the model's own does.

Models differ in what they do between tokens and logits, and new models appear all the time. So nothing is assumed from
a name: each model is run on a few tokens both ways.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable, TrainerError
from trainer.learner import attention, prefix_trees
from trainer.learner.chunked_head import token_logprobs

SEED = 5
SHARED, OWN = 40, 12
"""Tokens of the rows that are read both ways: the length that two rows share, and the length of each row's own part."""
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed difference of two orders of the same sums, relative to the hidden states."""
LENGTH_BOUND_ROPES = ("dynamic", "longrope")
"""Position embeddings that change for a whole batch when one of its rows exceeds the model's original maximum length.
"""


class NotProven(TrainerError):
    """The model does not read forests as it reads rows; the message gives the evidence."""


@torch.no_grad()
def head(causal: PreTrainedModel) -> None:
    """Raise ModelUnusable where logits are more than the head on the last hidden states (capped or scaled logits)."""
    name = type(causal).__name__
    token_ids_T = torch.arange(8, device=causal.device) % causal.config.get_text_config().vocab_size
    try:
        theirs_TV = causal(input_ids=token_ids_T[None], use_cache=False).logits[0]
        hidden_TH = causal.base_model(input_ids=token_ids_T[None], use_cache=False).last_hidden_state[0]
        ours_T, _ = token_logprobs(
            hidden_TH, causal.get_output_embeddings(), token_ids_T, torch.ones(8, device=causal.device)
        )
    except Exception as error:  # a model's own code may raise anything when it cannot work on text alone
        raise ModelUnusable(f"{name} does not read plain token ids with an adapter on it: {error}") from error
    theirs_T = theirs_TV.float().log_softmax(-1).gather(-1, token_ids_T[:, None])[:, 0]
    if not torch.allclose(theirs_T, ours_T.float(), rtol=1e-2, atol=10 * ROUNDING.get(causal.dtype, 1e-4)):
        raise ModelUnusable(f"{name} does more to its logits than its head; it cannot be trained here")


def positions(causal: PreTrainedModel, max_row_tokens: int) -> None:
    """Raise ModelUnusable where a long row would change how the other rows of its batch are read."""
    config = causal.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given, *(value for value in given.values() if isinstance(value, dict))]:
        made_for = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in LENGTH_BOUND_ROPES and max_row_tokens > made_for:
            raise ModelUnusable(
                f"{type(causal).__name__} changes its position embeddings for rows above {made_for} tokens, and for "
                f"all rows beside them: set trainer.max_row_tokens to at most {made_for}"
            )


def forest(causal: PreTrainedModel, plain: str, way: attention.Way) -> None:
    """Prove that the model reads forests as it reads rows.

    Three rows, two of them with a common prefix, are read together, and each alone with attention `plain`.

    Raises:
        NotProven: hidden states differ by more than rounding, a row's states depend in any bit on the tokens of other
            rows, or there is no gradient through them.
    """
    name = type(causal).__name__
    rows, others = _rows(causal.config.get_text_config().vocab_size)
    wood, other_wood = prefix_trees.forest(rows), prefix_trees.forest(others)
    try:
        causal.set_attn_implementation(attention.NAME)
        states_TH = _states(causal, wood, way)
        _prove_way_back(causal, states_TH)
        with torch.no_grad():
            other_states_TH = _states(causal, other_wood, way)
    except Exception as error:  # a model's own code may raise anything for an argument that it does not expect
        raise NotProven(f"{name} cannot read several rows in one sequence ({way}): {error}") from error
    first, other_first = (torch.from_numpy(one.places(0)).to(states_TH.device) for one in (wood, other_wood))
    if not torch.equal(states_TH[first], other_states_TH[other_first]):
        raise NotProven(f"{name} does not keep rows of one sequence apart ({way}): one changes with what others say")
    causal.set_attn_implementation(plain)
    with torch.no_grad():
        alone = [_alone(causal, row) for row in rows]
    causal.set_attn_implementation(attention.NAME)
    flats = [torch.from_numpy(wood.places(place)).to(states_TH.device) for place in range(len(rows))]
    off = max(_distance(states_TH[flat], alone_TH) for flat, alone_TH in zip(flats, alone, strict=True))
    if not off <= ROUNDING.get(causal.dtype, 0.0):
        raise NotProven(f"{name} reads rows of one sequence otherwise than alone ({way}): states are off by {off:.2g}")


def _rows(vocabulary: int) -> tuple[list[prefix_trees.Ids], list[prefix_trees.Ids]]:
    """Return two rows with a common prefix and a third; and the same again, with only the first row unchanged."""
    numbers = np.random.default_rng(SEED)
    shared, own, *rest = (numbers.integers(vocabulary, size=size) for size in (SHARED, OWN, OWN, SHARED, OWN, SHARED))
    # In the flat sequence the first row's own part comes after the others' tokens, and no draw makes a shared prefix
    # longer.
    own[0], rest[0][0], rest[2][0] = vocabulary - 1, 0, 1
    shared[0], rest[1][0], rest[3][0] = vocabulary - 1, 0, 1
    first = np.concatenate([shared, own])
    return [first, np.concatenate([shared, rest[0]]), rest[1]], [first, np.concatenate([shared, rest[2]]), rest[3]]


def _states(causal: PreTrainedModel, wood: prefix_trees.Forest, way: attention.Way) -> Tensor:
    """Return the hidden states (T, H) of the flat sequence."""
    token_ids_BT, position_ids_BT = (
        torch.from_numpy(ids_T)[None].to(causal.device) for ids_T in (wood.token_ids_T, wood.position_ids_T)
    )
    given: dict[str, Any] = {"tree": attention.tree_of(wood, way, causal.device)}
    read = causal.base_model(input_ids=token_ids_BT, position_ids=position_ids_BT, use_cache=False, **given)
    return cast(Tensor, read.last_hidden_state[0].float())


def _prove_way_back(causal: PreTrainedModel, states_TH: Tensor) -> None:
    try:
        states_TH.sum().backward()
    finally:
        causal.zero_grad(set_to_none=True)


def _alone(causal: PreTrainedModel, row: prefix_trees.Ids) -> Tensor:
    token_ids_BT = torch.from_numpy(row)[None].to(causal.device)
    return cast(Tensor, causal.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state[0].float())


def _distance(one_TH: Tensor, other_TH: Tensor) -> float:
    """Return the largest distance of two tokens' states, relative to their length."""
    return cast(float, ((one_TH - other_TH).norm(dim=-1) / other_TH.norm(dim=-1)).max().item())
