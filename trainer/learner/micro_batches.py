"""Build micro-batches from rows: what a forward pass reads, and which of its tokens are trained.

With trees, a micro-batch is one flat sequence of all its rows; without, rows lie side by side, padded on the right.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.domain.rows import Row
from trainer.errors import RowError
from trainer.learner import prefix_trees
from trainer.learner.attention import Tree, Way, tree_of, way_for
from trainer.learner.constrained import supports
from trainer.learner.constrained.bending import ConstrainedTokens


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of T tokens, and the S sampled tokens in them that are trained."""

    token_ids_BT: Tensor
    position_ids_BT: Tensor | None
    """None where every sequence is one row."""
    tree: Tree | None
    places_S: Tensor
    """Index into the B·T positions of the hidden state that predicts each sampled token."""
    token_ids_S: Tensor
    inference_logprobs_S: Tensor
    """NaN in supervised rows."""
    versions_S: Tensor
    temperatures_S: Tensor
    advantages_S: Tensor
    weights_S: Tensor
    """Weight of each token in the loss: its paper's normaliser."""
    sequences_S: Tensor
    """Index of the batch's row that each token is in."""
    served_S: Tensor
    """bool: the logprob is the server's; False where a grammar left that of the trainer, measured before the step."""
    constrained: tuple[ConstrainedTokens, ...]
    """The sampled tokens of constrained completions."""
    tool_places_E: Tensor | None
    """Index into the B·T positions of the hidden state that predicts each of E tokens that tools gave, as far as rows
    mark them; None where none does."""
    tool_ids_E: Tensor | None

    @classmethod
    def padded(
        cls, rows: Sequence[Row], weights: Sequence[float], device: torch.device, model_ends: Collection[int] = ()
    ) -> Self:
        """Put rows side by side. Attention is causal and padding is on the right, so no token sees padding.

        `model_ends`: the ids that end an answer of the model.
        """
        token_ids_BT = pad_sequence([torch.tensor(row.token_ids_T) for row in rows], batch_first=True)
        length = token_ids_BT.shape[1]
        flat = [place * length + np.arange(len(row.token_ids_T)) for place, row in enumerate(rows)]
        return cls(token_ids_BT.to(device), None, None, **_sampled(rows, weights, flat, device, model_ends))

    @classmethod
    def as_forest(
        cls,
        rows: Sequence[Row],
        weights: Sequence[float],
        ways: Collection[Way],
        device: torch.device,
        model_ends: Collection[int] = (),
    ) -> Self:
        """Build one flat sequence in which common prefixes of rows occur once. `ways`: the allowed ways to read it."""
        forest = prefix_trees.forest([prefix_trees.ids(row.token_ids_T) for row in rows])
        tree = tree_of(forest, way_for(forest, ways), device)
        token_ids_BT = torch.from_numpy(forest.token_ids_T)[None].to(device)
        position_ids_BT = torch.from_numpy(forest.position_ids_T)[None].to(device)
        flat = [forest.places(place) for place in range(len(rows))]
        return cls(token_ids_BT, position_ids_BT, tree, **_sampled(rows, weights, flat, device, model_ends))


def by_length(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Return groups of row positions such that rows times the longest row stays within the budget. For padded rows.

    Longest first: what does not fit into memory fails at once, and similar lengths waste little on padding. Equal
    lengths keep their order, so the same rows always make the same micro-batches. A row above the budget is alone.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first row of a batch is its longest: all its rows are padded to that length.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def _sampled(
    rows: Sequence[Row],
    weights: Sequence[float],
    flat: Sequence[prefix_trees.Ids],
    device: torch.device,
    model_ends: Collection[int],
) -> dict[str, Any]:
    """Return the fields of S sampled tokens. `flat`: the position of each token of a row."""
    masks = [np.asarray(row.sampled_T) for row in rows]
    if any(mask[0] for mask in masks):
        raise RowError("a row begins with a sampled token, which nothing predicts")
    each_row = list(zip(rows, masks, strict=True))
    counts_B = torch.tensor([int(mask.sum()) for mask in masks])
    # The hidden state before a token predicts it.
    places = [where[:-1][mask[1:]] for where, mask in zip(flat, masks, strict=True)]

    def each(name: str, dtype: torch.dtype) -> Tensor:
        masked = [np.asarray(getattr(row, name))[mask] for row, mask in each_row]
        return torch.from_numpy(np.concatenate(masked)).to(device, dtype)

    def of_row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts_B).to(device)

    return {
        "places_S": torch.from_numpy(np.concatenate(places)).to(device),
        "token_ids_S": each("token_ids_T", torch.int64),
        "inference_logprobs_S": each("inference_logprobs_T", torch.float32),
        "versions_S": each("versions_T", torch.int64),
        "temperatures_S": each("temperatures_T", torch.float32),
        "advantages_S": each("advantages_T", torch.float32),
        "weights_S": of_row(weights),
        "sequences_S": torch.repeat_interleave(counts_B).to(device),
        "served_S": torch.from_numpy(np.concatenate([_served(row)[mask] for row, mask in each_row])).to(device),
        "constrained": _constrained(each_row, device, model_ends),
        **_of_tools(rows, flat, device),
    }


def _of_tools(rows: Sequence[Row], flat: Sequence[prefix_trees.Ids], device: torch.device) -> dict[str, Tensor | None]:
    """Return the fields of the tokens that tools gave."""
    spans = [(row, where, *span) for row, where in zip(rows, flat, strict=True) for span in row.tool_spans]
    if not spans:
        return {"tool_places_E": None, "tool_ids_E": None}
    places = np.concatenate([where[start - 1 : end - 1] for _, where, start, end in spans])
    token_ids = [token_id for row, _, start, end in spans for token_id in row.token_ids_T[start:end]]
    return {
        "tool_places_E": torch.from_numpy(places).to(device),
        "tool_ids_E": torch.tensor(token_ids, device=device),
    }


def _served(row: Row) -> npt.NDArray[np.bool_]:
    """Return a bool for each token of the row: whether its logprob, where it has one, is the server's."""
    served_T = np.ones(len(row.token_ids_T), dtype=bool)
    for span in row.constrained:
        if span.constraints.grammar is not None:
            served_T[span.start : span.end] = False
    return served_T


def _constrained(
    each_row: Sequence[tuple[Row, npt.NDArray[np.bool_]]], device: torch.device, model_ends: Collection[int]
) -> tuple[ConstrainedTokens, ...]:
    """Return the sampled tokens of each constrained completion that has any."""
    constrained = []
    before = 0
    for row, mask_T in each_row:
        for span in row.constrained:
            offsets_C = np.flatnonzero(mask_T[span.start : span.end])
            if not len(offsets_C):
                continue
            first = before + int(mask_T[: span.start].sum())
            constraints = span.constraints
            constrained.append(
                ConstrainedTokens(
                    constraints,
                    at_C=torch.arange(first, first + len(offsets_C), device=device),
                    offsets_C=torch.from_numpy(offsets_C).to(device),
                    prompt_ids_P=torch.tensor(row.token_ids_T[: span.start], device=device),
                    output_ids_N=torch.tensor(row.token_ids_T[span.start : span.end], device=device),
                    barred_ids=tuple(constraints.barred_ids(model_ends)) if constraints.min_tokens else (),
                    supports_CB=supports.unpack(span.supports, len(offsets_C)),
                )
            )
        before += int(mask_T.sum())
    return tuple(constrained)
