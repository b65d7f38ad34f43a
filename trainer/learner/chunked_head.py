"""Compute log probabilities from hidden states: the model's head in fp32, in chunks, without a table of S x V.

Of S sampled tokens and a vocabulary of V, logits are S·V numbers: 10 GB for 16,000 tokens of a vocabulary of 152,000.
So they are computed chunk by chunk and dropped, and computed again in the backward pass. The weight of a head in 16
bits is never copied whole to fp32 either, which would be 2.2 GB for that vocabulary: on CUDA, bf16 is multiplied as it
is and added up in fp32; elsewhere slices of the vocabulary are widened one after another.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25
"""Logits that exist at once: 128 MiB in fp32."""
SLICE_WEIGHTS = 2**24
"""Weights of a 16-bit head that are widened at once: 64 MiB in fp32."""


def token_logprobs(
    hidden_SH: Tensor,
    head: torch.nn.Module,
    token_ids_S: Tensor,
    temperatures_S: Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Return the log probability of each token, and the entropy of its distribution, both (S,), fp32, in nats.

        z = (h · W + b) / temperature;  log p(token) = z_token - logsumexp(z);  H = -Σ p · log p

    The gradient flows to `hidden_SH` only: the head is not trained. d log p_i / dz = 1_i - p, and dH/dz = -p · (log p +
    H).
    """
    bias = cast(Tensor | None, getattr(head, "bias", None))
    rows = max(1, chunk_logits // cast(Tensor, head.weight).shape[0])
    return cast(
        tuple[Tensor, Tensor],
        _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # of torch
            hidden_SH, head.weight, bias, token_ids_S, temperatures_S, rows
        ),
    )


def chosen_logprobs(
    hidden_SH: Tensor,
    head: torch.nn.Module,
    ids_SK: Tensor,
    temperatures_S: Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> Tensor:
    """Return the log probabilities (S, K), in nats, of K tokens at each position. The gradient flows to `hidden_SH`.

    Logits of a chunk are dropped after the forward pass and computed again in the backward pass.
    """
    weight_VH, bias_V = cast(Tensor, head.weight), cast(Tensor | None, getattr(head, "bias", None))

    def chunk(hidden_CH: Tensor, ids_CK: Tensor, temperatures_C: Tensor) -> Tensor:
        z_CV = wide_logits(hidden_CH, weight_VH, bias_V) / temperatures_C[:, None]
        return z_CV.gather(-1, ids_CK) - z_CV.logsumexp(-1, keepdim=True)

    rows = max(1, chunk_logits // weight_VH.shape[0])
    return torch.cat(
        [
            cast(
                Tensor,
                checkpoint(
                    chunk, hidden_SH[part], ids_SK[part], temperatures_S[part],
                    use_reentrant=False, preserve_rng_state=False,
                ),
            )
            for part in _parts(len(hidden_SH), rows)
        ]
    )  # fmt: skip


@torch.no_grad()
def likeliest(
    hidden_SH: Tensor, head: torch.nn.Module, temperatures_S: Tensor, count: int, *, chunk_logits: int = CHUNK_LOGITS
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest tokens at each position and their log probabilities in nats, both (S, K)."""
    weight_VH, bias_V = cast(Tensor, head.weight), cast(Tensor | None, getattr(head, "bias", None))
    count = min(count, weight_VH.shape[0])
    ids, logprobs = [], []
    for part in _parts(len(hidden_SH), max(1, chunk_logits // weight_VH.shape[0])):
        z_CV = _logits(hidden_SH[part], weight_VH, bias_V, temperatures_S[part])
        top_CK, ids_CK = z_CV.topk(count)
        ids.append(ids_CK)
        logprobs.append(top_CK - z_CV.logsumexp(-1, keepdim=True))
    return torch.cat(ids), torch.cat(logprobs)


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`; `rows` is the number of tokens whose logits are computed at once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_ids_S: Tensor,
        temperatures_S: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        saved_p_CV = None
        for part in _parts(len(hidden_SH), rows):
            z_CV = _logits(hidden_SH[part], weight_VH, bias_V, temperatures_S[part])
            at_C = z_CV.gather(-1, token_ids_S[part, None])[:, 0]
            lse_C = z_CV.logsumexp(-1)
            p_CV = (z_CV - lse_C[:, None]).exp_()
            logprobs.append(at_C - lse_C)
            entropies.append(lse_C - torch.linalg.vecdot(p_CV, z_CV))
            saved_p_CV = p_CV
        ctx.rows = rows
        # A single chunk is small enough to store, so that it is not computed twice.
        ctx.save_for_backward(
            hidden_SH, weight_VH, bias_V, token_ids_S, temperatures_S, saved_p_CV if len(logprobs) == 1 else None
        )
        empty = hidden_SH.new_zeros(0, dtype=_wide(weight_VH.dtype))
        return torch.cat(logprobs or [empty]), torch.cat(entropies or [empty])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, by_logprob_S: Tensor, by_entropy_S: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, token_ids_S, temperatures_S, saved_p_CV = ctx.saved_tensors  # type: ignore[attr-defined]
        by_hidden = []
        for part in _parts(len(hidden_SH), ctx.rows):  # type: ignore[attr-defined]
            p_CV = saved_p_CV
            if p_CV is None:
                z_CV = _logits(hidden_SH[part], weight_VH, bias_V, temperatures_S[part])
                p_CV = z_CV.softmax(-1)
            by_C = by_logprob_S[part, None]
            by_z_CV = p_CV * -by_C
            by_z_CV.scatter_add_(-1, token_ids_S[part, None], by_C)
            if by_entropy_S[part].any():
                logp_CV = p_CV.log().clamp(min=torch.finfo(p_CV.dtype).min)
                entropy_C1 = -torch.linalg.vecdot(p_CV, logp_CV)[:, None]
                by_z_CV -= by_entropy_S[part, None] * p_CV * (logp_CV + entropy_C1)
            by_z_CV /= temperatures_S[part, None]
            by_hidden.append(_by_hidden(by_z_CV, weight_VH).to(hidden_SH.dtype))
        return torch.cat(by_hidden) if by_hidden else torch.zeros_like(hidden_SH), None, None, None, None, None


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]


def wide_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return logits in at least fp32. The gradient flows to `hidden_CH` only."""
    return cast(Tensor, _WideLogits.apply(hidden_CH, weight_VH, bias_V))  # type: ignore[no-untyped-call]  # of torch


class _WideLogits(torch.autograd.Function):
    """See `wide_logits`."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_VH)
        ctx.dtype = hidden_CH.dtype
        return _products(hidden_CH, weight_VH, bias_V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_z_CV: Tensor) -> tuple[Tensor | None, ...]:
        (weight_VH,) = ctx.saved_tensors
        return _by_hidden(by_z_CV, weight_VH).to(ctx.dtype), None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperatures_C: Tensor) -> Tensor:
    return _products(hidden_CH, weight_VH, bias_V).div_(temperatures_C[:, None])


def _products(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return h · W + b in at least fp32."""
    if _multiplies_as_it_is(weight_VH) and hidden_CH.dtype == weight_VH.dtype:
        z_CV = torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)
    elif weight_VH.dtype.itemsize >= torch.float32.itemsize:
        z_CV = torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH)
    else:
        hidden_CH = hidden_CH.float()
        z_CV = hidden_CH.new_empty(len(hidden_CH), len(weight_VH))
        for part in _slices(weight_VH):
            torch.mm(hidden_CH, weight_VH[part].float().T, out=z_CV[:, part])
    if bias_V is not None:
        z_CV += bias_V
    return z_CV


def _by_hidden(by_z_CV: Tensor, weight_VH: Tensor) -> Tensor:
    """Return the gradient of h from that of the logits, in at least fp32."""
    if _multiplies_as_it_is(weight_VH):
        high, low = (torch.mm(part_CV, weight_VH, out_dtype=torch.float32) for part_CV in in_two(by_z_CV))
        return high + low
    if weight_VH.dtype.itemsize >= torch.float32.itemsize:
        return by_z_CV @ weight_VH
    by_hidden_CH = by_z_CV.new_zeros(len(by_z_CV), weight_VH.shape[1])
    for part in _slices(weight_VH):
        by_hidden_CH.addmm_(by_z_CV[:, part], weight_VH[part].float())
    return by_hidden_CH


def in_two(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bf16 tensors whose sum is the fp32 tensor, up to 2^-16 of each number."""
    high = numbers.bfloat16()
    return high, (numbers - high).bfloat16()


def _multiplies_as_it_is(weight_VH: Tensor) -> bool:
    """Return whether torch multiplies bf16 into fp32 there; fp16 would lose small gradients."""
    return weight_VH.dtype == torch.bfloat16 and weight_VH.device.type == "cuda"


def _slices(weight_VH: Tensor) -> list[slice]:
    """Return slices of the vocabulary."""
    return _parts(len(weight_VH), max(1, SLICE_WEIGHTS // weight_VH.shape[1]))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return fp32, or the type itself where it is as wide."""
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32
