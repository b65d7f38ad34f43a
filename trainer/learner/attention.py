"""Attention over a forest of rows: each token sees its own piece up to itself, and all pieces that its piece continues.

There are three ways with the same result. `segments` takes piece by piece, each with a copy of the keys of its path: it
spends nearly no work on keys that are not visible, with any kernel. Copies for long paths are dropped and made again in
the backward pass, so that memory grows with the tokens and not with their square. `dense` gives one call a mask of
T x T: the plain reference, and better for chains of forks, whose paths are long. `flex` compiles that mask into a
kernel that skips empty blocks: for long forests on CUDA.

It is registered with transformers as the attention called NAME. Models pass their keyword arguments down to it, and
with them the `tree`; without a tree it is transformers' own attention. Other attention features of a model (a sliding
window, capped scores, sinks) are not supported and are refused, so that a tree is never read wrongly.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from trainer.errors import TrainerError
from trainer.learner.prefix_trees import ROOT, Forest, Ids

NAME = "whetstone"
FLEX_FROM = 4096
"""From this many tokens, `auto` takes flex-attention on CUDA; below, the masks of the other ways are small."""
LONG_PATHS = 16
"""Where the keys of all paths are more than this many times the tokens, `auto` takes `dense` instead of `segments`,
which copies them.
"""
LONGEST_DENSE = 2**13
"""Tokens; torch widens the mask to the precision of the queries, and for a longer forest that would be above 256 MiB in
fp32.
"""
QUERIES = 256
"""Most queries of a piece in one call: each call reads keys up to its last query only."""
RECOMPUTED_FROM = 2**12
"""Keys. A call that copies as many keys of a path or more is computed again in the backward pass: what all calls of a
layer copy is the square of the tokens, over QUERIES.
"""
BLOCK = 128
"""Queries and keys in a block of flex-attention: its default, which its kernels are tuned for."""
HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states"})
"""Arguments of attention that change nothing about a forest."""

Way = Literal["segments", "dense", "flex"]


class NotAForest(TrainerError):
    """The model needs attention features that a forest does not support."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries of a piece, with all keys that one of them sees."""

    piece: int
    start: int
    end: int
    """The queries are the piece's tokens `start` to `end`, and its keys those up to `end`."""
    before: list[int]
    """The pieces that it continues, the first of them first."""
    mask: Tensor | None
    """bool (queries, keys), True where a query sees a key; None where causal."""


@dataclass(slots=True)
class Tree:
    """A forest in the form that attention reads."""

    way: Way
    lengths: list[int] = field(default_factory=list)
    """For `segments`: tokens of each piece."""
    parts: list[Part] = field(default_factory=list)
    """For `segments`: what is computed in one call each."""
    mask: Tensor | None = None
    """For `dense`: bool (T, T), True where a query sees a key."""
    blocks: Any = None
    """For `flex`: the same mask by blocks, a torch BlockMask."""


def tree_of(forest: Forest, way: Way, device: torch.device) -> Tree:
    """Return what attention needs of the forest; computed once for all layers."""
    if way == "segments":
        return Tree(way, [piece.length for piece in forest.pieces], list(_parts(forest, device)))
    end_T = forest.ends()
    if way == "flex":
        return Tree(way, blocks=_blocks(end_T, device))
    queries_T1 = torch.arange(len(end_T), device=device)[:, None]
    return Tree(way, mask=(queries_T1 < torch.from_numpy(end_T).to(device)).tril())


def ways_of(wanted: str, device: torch.device) -> tuple[Way, ...]:
    """Return the ways that the setting `attention` allows on the device."""
    if wanted != "auto":
        return (cast(Way, wanted),)
    return ("segments", "dense", "flex") if device.type == "cuda" else ("segments", "dense")


def way_for(forest: Forest, proven: Collection[Way]) -> Way:
    """Return the proven way that suits the forest best."""
    tokens = len(forest.token_ids_T)
    if "flex" in proven and (tokens >= FLEX_FROM or len(proven) == 1):
        return "flex"
    if "segments" not in proven:
        return "dense"
    keys: list[int] = []
    for piece in forest.pieces:
        keys.append(piece.length + (0 if piece.parent == ROOT else keys[piece.parent]))
    return "dense" if "dense" in proven and sum(keys) > LONG_PATHS * tokens and tokens <= LONGEST_DENSE else "segments"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of (1, heads, T, size) queries to (1, key heads, T, size) keys.

    Return (1, T, heads, size) and None for the weights.

    Raises:
        NotAForest: there is a tree, and the model also passes an argument that a forest does not support.
    """
    if tree is None:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
        return attended, None
    unsupported = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if unsupported or dropout or attention_mask is not None:
        raise NotAForest(f"its attention also has {', '.join(unsupported) or 'a mask or dropout of its own'}")
    if tree.way == "flex":
        attended = _flex()(query, key, value, block_mask=tree.blocks, scale=scaling, enable_gqa=True)
    elif tree.way == "dense":
        attended = _plain(query, key, value, scaling, tree.mask)
    else:
        attended = _by_parts(query, key, value, scaling, tree)
    return attended.transpose(1, 2).contiguous(), None


def _by_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, tree: Tree) -> Tensor:
    # Split once: the gradient of a slice is as long as the whole sequence, and there is one for each key of each path.
    queries, keys, values = (whole.split(tree.lengths, dim=2) for whole in (query, key, value))

    def along(pieces: Sequence[Tensor], part: Part) -> Tensor:
        own = pieces[part.piece][:, :, : part.end]
        return torch.cat([*(pieces[one] for one in part.before), own], dim=2) if part.before else own

    def attended(part: Part) -> Tensor:
        of_part = queries[part.piece][:, :, part.start : part.end]
        return _plain(of_part, along(keys, part), along(values, part), scaling, part.mask)

    return torch.cat(
        [
            cast(Tensor, checkpoint(attended, part, use_reentrant=False, preserve_rng_state=False))
            if part.mask is not None and part.mask.shape[1] >= RECOMPUTED_FROM
            else attended(part)
            for part in tree.parts
        ],
        dim=2,
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None) -> Tensor:
    """Compute attention under the mask; causal without one.

    Each key head is repeated to match the number of query heads.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)


def _parts(forest: Forest, device: torch.device) -> Iterator[Part]:
    befores = [forest.path(place)[:-1] for place in range(len(forest.pieces))]
    seen = [sum(forest.pieces[one].length for one in before) for before in befores]
    forks = [(place, piece) for place, piece in enumerate(forest.pieces) if befores[place]]
    # Each mask is a part of one triangle: query i sees the keys up to `longest` + i.
    longest = max((seen[place] + piece.length for place, piece in forks), default=0)
    triangle = torch.ones(QUERIES, longest + QUERIES, dtype=torch.bool, device=device).tril(longest)
    for place, piece in enumerate(forest.pieces):
        if not befores[place]:
            yield Part(place, 0, piece.length, [], None)
            continue
        for start in range(0, piece.length, QUERIES):
            end = min(start + QUERIES, piece.length)
            own = longest - seen[place] - start
            mask = triangle[: end - start, own : longest + end - start]
            yield Part(place, start, end, befores[place], mask)


def _blocks(end_T: Ids, device: torch.device) -> Any:
    """Return the mask by blocks of BLOCK queries times BLOCK keys, without a table of T x T.

    Key k is seen by queries k to end_T[k]. So a block of keys is seen by a later block of queries if the largest end of
    its keys lies beyond the first query, and whole if the smallest lies beyond the last one.
    """
    # Imported here because it loads a compiler, which takes a second.
    from torch.nn.attention.flex_attention import BlockMask

    tokens = len(end_T)
    starts_N = np.arange(0, tokens, BLOCK)
    ends_N = starts_N + BLOCK
    later_NN = starts_N[:, None] > starts_N
    seen_NN = later_NN & (np.maximum.reduceat(end_T, starts_N) > starts_N[:, None])
    # A block that reaches beyond the sequence is never whole.
    whole_NN = seen_NN & (np.minimum.reduceat(end_T, starts_N) >= ends_N[:, None])
    seen_NN |= np.eye(len(starts_N), dtype=bool)
    on_device_T = torch.from_numpy(end_T).to(device)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < on_device_T[key])

    in_part, whole = (_ordered(blocks_NN, device) for blocks_NN in (seen_NN & ~whole_NN, whole_NN))
    return BlockMask.from_kv_blocks(*in_part, *whole, BLOCK, seen, (tokens, tokens))


def _ordered(blocks_NN: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each block of queries how many blocks of keys are set, and the indices of all, those that are first.

    The form of flex-attention: (1, 1, N) and (1, 1, N, N), int32.
    """
    indices_NN = np.argsort(~blocks_NN, axis=-1, kind="stable").astype(np.int32)
    counts_N = blocks_NN.sum(-1, dtype=np.int32)
    return torch.from_numpy(counts_N)[None, None].to(device), torch.from_numpy(indices_NN)[None, None].to(device)


@cache
def _flex() -> Callable[..., Tensor]:
    """Return flex-attention. On CUDA it compiles at its first call, which takes a minute; elsewhere it does not."""
    from torch.nn.attention.flex_attention import flex_attention

    if torch.cuda.is_available():
        return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True))
    return cast(Callable[..., Tensor], flex_attention)


# It is causal by itself: neither forests nor rows padded on the right need a mask.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)
