"""Rows in, micro-batches out: what a forward pass reads, and which of it is learned. Knows rows and tensors; no model.

With trees a micro-batch is one flat sequence of all its rows; without, rows lie side by side, padded on the right.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.errors import RowError
from trainer.learner import trees
from trainer.learner.attention import Tree, Way, tree_of, way_for
from trainer.rows import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of T tokens, and the S sampled tokens in them that are learned."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor | None
    """None where every sequence is one row."""
    tree: Tree | None
    places_S: Tensor
    """Where the hidden state that predicts each sampled token lies, in the B·T of them."""
    token_ids_S: Tensor
    inference_logprobs_S: Tensor
    """NaN in supervised rows."""
    versions_S: Tensor
    temperatures_S: Tensor
    advantages_S: Tensor
    weights_S: Tensor
    """Of each token in the loss: its paper's normaliser."""
    sequences_S: Tensor
    """Which of the batch's rows it is in."""

    @classmethod
    def padded(cls, rows: Sequence[Row], weights: Sequence[float], device: torch.device) -> Self:
        """Rows side by side. Attention is causal and padding is on the right, so no token ever sees any."""
        token_ids_BT = pad_sequence([torch.tensor(row.token_ids_T) for row in rows], batch_first=True)
        length = token_ids_BT.shape[1]
        flat = [place * length + np.arange(len(row.token_ids_T)) for place, row in enumerate(rows)]
        return cls(token_ids_BT.to(device), None, None, **_sampled(rows, weights, flat, device))

    @classmethod
    def as_forest(
        cls, rows: Sequence[Row], weights: Sequence[float], ways: Collection[Way], device: torch.device
    ) -> Self:
        """One flat sequence in which what rows begin with alike stands once; `ways` are those it may be read in."""
        forest = trees.forest([trees.ids(row.token_ids_T) for row in rows])
        tree = tree_of(forest, way_for(forest, ways), device)
        token_ids_BT = torch.from_numpy(forest.token_ids_T)[None].to(device)
        position_ids_BT = torch.from_numpy(forest.position_ids_T)[None].to(device)
        flat = [forest.places(place) for place in range(len(rows))]
        return cls(token_ids_BT, position_ids_BT, tree, **_sampled(rows, weights, flat, device))


def by_length(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Places of rows, grouped so that rows times the longest of them stay within the budget: for rows that are padded.

    Longest first: what does not fit into memory says so at once, and like lengths waste little on padding. Equal
    lengths keep their order, so the same rows always make the same micro-batches. A row above the budget is alone.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first of a batch is its longest: its length is what every row of it is padded to.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _sampled(
    rows: Sequence[Row], weights: Sequence[float], flat: Sequence[trees.Ids], device: torch.device
) -> dict[str, Tensor]:
    """The fields of S sampled tokens. `flat`: where each of a row's tokens lies."""
    masks = [np.asarray(row.sampled_T) for row in rows]
    if any(mask[0] for mask in masks):
        raise RowError("a row begins with a sampled token, which nothing predicts")
    counts_B = torch.tensor([int(mask.sum()) for mask in masks])
    # The hidden state before a token predicts it.
    places = [where[:-1][mask[1:]] for where, mask in zip(flat, masks, strict=True)]

    def each(name: str, dtype: torch.dtype) -> Tensor:
        kept = [np.asarray(getattr(row, name))[mask] for row, mask in zip(rows, masks, strict=True)]
        return torch.from_numpy(np.concatenate(kept)).to(device, dtype)

    def of_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts_B).to(device)

    return {
        "places_S": torch.from_numpy(np.concatenate(places)).to(device),
        "token_ids_S": each("token_ids_T", torch.int64),
        "inference_logprobs_S": each("inference_logprobs_T", torch.float32),
        "versions_S": each("versions_T", torch.int64),
        "temperatures_S": each("temperatures_T", torch.float32),
        "advantages_S": of_row([row.advantage for row in rows]),
        "weights_S": of_row(weights),
        "sequences_S": torch.repeat_interleave(counts_B).to(device),
    }
