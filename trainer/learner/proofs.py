"""What is proven of a model before it trains: that our forward pass computes what its own does.

Models differ in what they do between tokens and logits, and more of them appear than anyone can list. So nothing is
assumed of a name: each is run on a few tokens both ways.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable
from trainer.learner import attention, trees

SEED = 5
SHARED, OWN = 40, 12
"""Tokens of the rows that are read both ways: what two of them share, and what is each one's."""
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far two orders of the same sums may lie apart, relative to the hidden states."""
APART = 0.2
"""The most that a forest's states may differ, relative to how they would if rows were not kept apart at all."""


class NotProven(Exception):
    """The model does not read forests as it reads rows; the message says how that was seen."""


@torch.no_grad()
def head(causal: PreTrainedModel) -> None:
    """Raise ModelUnusable where logits are more than the head on the last hidden states (capped or scaled ones)."""
    token_ids_BT = torch.arange(8, device=causal.device)[None] % causal.config.get_text_config().vocab_size
    theirs = causal(input_ids=token_ids_BT, use_cache=False).logits
    decoder, own_head = causal.base_model, causal.get_output_embeddings()
    ours = own_head(decoder(input_ids=token_ids_BT, use_cache=False).last_hidden_state)
    if not torch.allclose(theirs.float(), ours.float(), rtol=1e-3, atol=1e-3):
        raise ModelUnusable(f"{type(causal).__name__} does more to its logits than its head; it cannot be trained here")


@torch.no_grad()
def forest(causal: PreTrainedModel, plain: str, way: attention.Way) -> None:
    """Have the model read forests: three rows, two of which begin alike, as one and each alone with attention `plain`.

    Raises:
        NotProven: the hidden states differ by more than rounding, or not clearly less than if rows saw one another.
    """
    rows = _rows(causal.config.get_text_config().vocab_size)
    wood = trees.forest(rows)
    try:
        causal.set_attn_implementation(attention.NAME)
        states_TH = _states(causal, wood, attention.tree_of(wood, way, causal.device))
    except Exception as error:  # whatever a model of others says to an argument it does not know
        raise NotProven(f"{type(causal).__name__} cannot read several rows in one sequence: {error}") from error
    mixed_TH = _states(causal, wood, None)
    causal.set_attn_implementation(plain)
    try:
        alone = [_alone(causal, row) for row in rows]
    finally:
        causal.set_attn_implementation(attention.NAME)
    off, mixed_off = 0.0, 0.0
    for place, alone_TH in enumerate(alone):
        flat = torch.from_numpy(wood.places(place)).to(states_TH.device)
        off = max(off, _distance(states_TH[flat], alone_TH))
        mixed_off = max(mixed_off, _distance(mixed_TH[flat], alone_TH))
    if not off <= min(ROUNDING.get(causal.dtype, 0.0), APART * mixed_off):
        raise NotProven(
            f"{type(causal).__name__} does not keep rows of one sequence apart ({way}): hidden states are off by "
            f"{off:.2g}, and by {mixed_off:.2g} where nothing keeps them apart"
        )


def _rows(vocabulary: int) -> list[trees.Ids]:
    numbers = np.random.default_rng(SEED)
    shared = numbers.integers(vocabulary, size=SHARED)
    return [
        np.concatenate([shared, numbers.integers(vocabulary, size=OWN)]),
        np.concatenate([shared, numbers.integers(vocabulary, size=OWN)]),
        numbers.integers(vocabulary, size=SHARED),
    ]


def _states(causal: PreTrainedModel, wood: trees.Forest, tree: attention.Tree | None) -> Tensor:
    """Hidden states (T, H) of the flat sequence."""
    given: dict[str, Any] = {} if tree is None else {"tree": tree}
    token_ids_BT, position_ids_BT = (
        torch.from_numpy(ids_T)[None].to(causal.device) for ids_T in (wood.token_ids_T, wood.position_ids_T)
    )
    read = causal.base_model(input_ids=token_ids_BT, position_ids=position_ids_BT, use_cache=False, **given)
    return cast(Tensor, read.last_hidden_state[0].float())


def _alone(causal: PreTrainedModel, row: trees.Ids) -> Tensor:
    token_ids_BT = torch.from_numpy(row)[None].to(causal.device)
    return cast(Tensor, causal.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state[0].float())


def _distance(one_TH: Tensor, other_TH: Tensor) -> float:
    """The largest distance of two tokens' states, relative to their length."""
    return cast(float, ((one_TH - other_TH).norm(dim=-1) / other_TH.norm(dim=-1)).max().item())
