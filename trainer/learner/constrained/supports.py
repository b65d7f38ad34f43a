"""Compute which tokens a truncation leaves (its support), and store supports small.

A support is stored as one bit for each token of the vocabulary, and all supports of a completion are compressed
together: most hold a handful of tokens and take a few bytes, and the largest take an eighth of a byte per token of the
vocabulary.
"""

import math
import zlib

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.domain.constraints import Constraints

TIE = 1e-5
"""Nats. Tokens that lie so little below the least allowed one are allowed as well: server and trainer add up in another
order, and which of two equal tokens came first is unknown. A wider margin would let in what was not allowed.
"""


def support(z_CV: Tensor, constraints: Constraints) -> Tensor:
    """Return, for logits at their temperature, which tokens min_p, top_k and top_p leave, in vLLM's order; bool.

    Each of the three leaves the most probable tokens, so a support is what lies above one of their bounds. vLLM's
    functions: `MinPLogitsProcessor.apply`, `apply_top_k_top_p_pytorch`. Tokens of logit -inf are never in it.
    """
    vocabulary = z_CV.shape[1]
    least_C1 = z_CV.new_full((len(z_CV), 1), -math.inf)
    if constraints.min_p > 0:
        least_C1 = z_CV.amax(-1, keepdim=True) + math.log(constraints.min_p)
    if 0 < constraints.top_k < vocabulary:
        left_CV = z_CV.masked_fill(z_CV < least_C1, -math.inf)
        least_C1 = torch.maximum(least_C1, left_CV.topk(constraints.top_k).values[:, -1:])
    if constraints.top_p < 1:
        ordered_CV = z_CV.masked_fill(z_CV < least_C1, -math.inf).sort(-1).values
        below_CV = ordered_CV.softmax(-1).cumsum(-1) <= 1 - constraints.top_p
        # At least the most probable token stays.
        first_C1 = below_CV.sum(-1, keepdim=True).clamp(max=vocabulary - 1)
        least_C1 = torch.maximum(least_C1, ordered_CV.gather(-1, first_C1))
    return (z_CV >= least_C1 - TIE) & (z_CV > -math.inf)


def bits(support_CV: Tensor) -> npt.NDArray[np.uint8]:
    """Return supports as bits, eight tokens of the vocabulary a byte."""
    return np.packbits(support_CV.cpu().numpy(), axis=1)


def mask(supports_CB: npt.NDArray[np.uint8], vocabulary: int, device: torch.device) -> Tensor:
    """Return what `bits` were made from."""
    return torch.from_numpy(np.unpackbits(supports_CB, axis=1, count=vocabulary)).to(device).bool()


def pack(supports_CB: npt.NDArray[np.uint8]) -> bytes:
    """Compress the bits of a completion's supports."""
    return zlib.compress(supports_CB.tobytes(), 1)


def unpack(supports: bytes, count: int) -> npt.NDArray[np.uint8] | None:
    """Return the bits of `count` supports; None where the completion was not truncated."""
    if not supports:
        return None
    return np.frombuffer(zlib.decompress(supports), np.uint8).reshape(count, -1)
