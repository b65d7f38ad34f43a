"""Prove before training that our forward pass computes what the model's own does.

Models differ in what they do between tokens and logits, and new models appear all the time. So nothing is assumed from
a name: each model is run on a few tokens both ways.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.errors import ModelUnusable, TrainerError
from trainer.learner import attention, prefix_trees
from trainer.learner.chunked_head import token_logprobs
from trainer.learner.sharded.units import through_head

SEED = 5
SHARED, OWN = 64, 32
"""Tokens of the rows that are read both ways: the length that two rows share, and the length of each row's own part.
Both readings together are of 512 tokens.
"""
NOISE = 3.0
"""A piece may be this many times as far from its rows alone as the model's own rounding is. In bf16 SmolLM2-135M's
pieces are 0.6 to 1.0 times as far; one that counts its own positions is 6 times as far, one without its prefix 20.
"""
SMALLEST_NOISE = 1e-4
"""Rounding, relative to the hidden states, that harms no training; fp32's is below it."""
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed difference of two orders of the same sums, relative to the logits."""
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
        temperatures_T = torch.ones(8, device=causal.device)
        ours_T, _ = through_head(causal.get_output_embeddings(), token_logprobs, hidden_TH, token_ids_T, temperatures_T)
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


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model makes of a few rows when it reads each alone: what it has to make of them in a forest, too."""

    forests: list[prefix_trees.Forest]
    """Forests of the same shape: the first; then, for each of its rows, one in which only that row is the same."""
    alone: dict[int, Tensor]
    """Place in `forests` -> the hidden states (T, H) of its tokens, each row read alone."""
    noise: float
    """Median distance of a token's states between two kernels of attention: the model's own rounding."""


@torch.no_grad()
def alone(causal: PreTrainedModel, plain: str, seed: int = SEED) -> Reference:
    """Read the rows of `forest` one by one, with attention `plain`, and with another kernel.

    Raises:
        NotProven: the model does not read rows of token ids.
    """
    choices = _rows(causal.config.get_text_config().vocab_size, seed)
    forests = [prefix_trees.forest(rows) for rows in choices]
    try:
        # The first and the last have nothing in common but one row.
        states = {place: _alone(causal, choices[place], forests[place]) for place in (0, len(forests) - 1)}
        causal.set_attn_implementation("sdpa" if plain == "eager" else "eager")
        otherwise = {place: _alone(causal, choices[place], forests[place]) for place in states}
    except Exception as error:  # a model's own code may raise anything for a kernel that it does not have
        raise NotProven(f"{type(causal).__name__} cannot be read with two kernels of attention: {error}") from error
    finally:
        causal.set_attn_implementation(plain)
    noise = torch.cat([_distances(otherwise[place], states[place]) for place in states]).median().item()
    return Reference(forests, states, noise)


def forest(causal: PreTrainedModel, reference: Reference, way: attention.Way) -> None:
    """Prove that the model reads forests as it reads rows.

    Three rows, two of them with a common prefix, are read together. All that another row says must not change a bit of
    a row's states. In a low precision the same sums in another order are off by a few per cent, and for single tokens
    by far more; so the rows read alone are compared by the median of each piece, with the model's own rounding.

    Raises:
        NotProven: a row's states depend in any bit on the tokens of other rows, a piece's states differ from those of
            its rows alone by more than rounding, or there is no gradient through them.
    """
    name = type(causal).__name__
    first, *others = reference.forests
    try:
        causal.set_attn_implementation(attention.NAME)
        states_TH = _states(causal, first, way)
        _prove_way_back(causal, states_TH)
        states_TH = states_TH.detach()
        with torch.no_grad():
            others_TH = [_states(causal, other, way) for other in others]
    except Exception as error:  # a model's own code may raise anything for an argument that it does not expect
        raise NotProven(f"{name} cannot read several rows in one sequence ({way}): {error}") from error
    for row, other_TH in enumerate(others_TH):
        places_T = torch.from_numpy(first.places(row)).to(states_TH.device)
        if not torch.equal(states_TH[places_T], other_TH[places_T]):
            raise NotProven(
                f"{name} does not keep rows of one sequence apart ({way}): one changes with what others say"
            )
    allowed = NOISE * max(reference.noise, torch.finfo(causal.dtype).eps, SMALLEST_NOISE)
    distances = (
        _distances(together_TH, reference.alone[place])
        for place, together_TH in ((0, states_TH), (len(others_TH), others_TH[-1]))
    )
    off = max(off_T[piece.start : piece.end].median().item() for off_T in distances for piece in first.pieces)
    if not off <= allowed:
        raise NotProven(
            f"{name} reads rows of one sequence otherwise than alone ({way}): states are off by {off:.2g}, and its own "
            f"rounding is {reference.noise:.2g}"
        )


def _rows(vocabulary: int, seed: int) -> list[list[prefix_trees.Ids]]:
    """Return two rows with a common prefix and a third; then, for each of them, three of which only that is the same.

    Where tokens are not the same, each differs.
    """
    numbers = np.random.default_rng(seed)
    # The first tokens keep the order of the pieces, and no draw makes a shared prefix longer.
    firsts = {"shared": vocabulary - 1, "own": vocabulary - 1, "other_own": 0, "alone": 0}
    lengths = {"shared": SHARED, "own": OWN, "other_own": OWN, "alone": SHARED}
    middle = vocabulary - 4
    drawn, changed = {}, {}
    for part, first in firsts.items():
        ids = numbers.integers(middle, size=lengths[part])
        drawn[part], changed[part] = 2 + ids, 2 + (ids + middle // 2) % middle
        drawn[part][0], changed[part][0] = first, abs(first - 1)

    def rows(changes: Iterable[str]) -> list[prefix_trees.Ids]:
        ids = drawn | {part: changed[part] for part in changes}
        return [
            np.concatenate([ids["shared"], ids["own"]]),
            np.concatenate([ids["shared"], ids["other_own"]]),
            ids["alone"],
        ]

    return [rows(changes) for changes in ((), ("other_own", "alone"), ("own", "alone"), ("shared", "own", "other_own"))]


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


def _alone(causal: PreTrainedModel, rows: Sequence[prefix_trees.Ids], wood: prefix_trees.Forest) -> Tensor:
    """Return the hidden states (T, H) of the forest's tokens, each row read alone."""
    flat: dict[int, Tensor] = {}
    for place, row in enumerate(rows):
        token_ids_BT = torch.from_numpy(row)[None].to(causal.device)
        states_TH = causal.base_model(input_ids=token_ids_BT, use_cache=False).last_hidden_state[0].float()
        flat |= dict(zip(wood.places(place).tolist(), states_TH, strict=True))
    return torch.stack([flat[at] for at in range(len(flat))])


def _distances(one_TH: Tensor, other_TH: Tensor) -> Tensor:
    """Return the distance (T,) of each token's states, relative to their length."""
    lengths_T = other_TH.norm(dim=-1)
    # A padding token's embedding may be zero, and in the first place its states are.
    return cast(Tensor, (one_TH - other_TH).norm(dim=-1) / lengths_T.clamp_min(torch.finfo(lengths_T.dtype).tiny))
