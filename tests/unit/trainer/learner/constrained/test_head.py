"""Constrained and free tokens of one batch, in chunks: the plain formula, forward and back."""

import random

import pytest
import torch
from torch import Tensor

from trainer.domain.constraints import Constraints
from trainer.learner import chunked_head
from trainer.learner.constrained import head, supports
from trainer.learner.constrained.bending import ConstrainedTokens, bend

S, H, V = 9, 5, 11


@pytest.fixture
def case() -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor, list[ConstrainedTokens]]:
    """Nine tokens: 2 to 4 are penalized, 6 to 8 penalized and truncated, the others free."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    layer = torch.nn.Linear(H, V, dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(torch.randn(V, H, generator=generator, dtype=torch.float64))
    hidden_SH = torch.randn(S, H, generator=generator, dtype=torch.float64, requires_grad=True)
    token_ids_S = torch.randint(V, (S,), generator=generator)
    temperatures_S = 0.5 + torch.rand(S, generator=generator, dtype=torch.float64)
    support_CV = torch.rand(3, V, generator=generator) < 0.4
    support_CV.scatter_(1, token_ids_S[6:9, None], True)
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
    constrained = [
        ConstrainedTokens(
            Constraints(**penalties, top_k=top_k),
            at_C=torch.arange(first, first + 3),
            offsets_C=torch.tensor([0, 2, 3]),
            prompt_ids_P=torch.tensor([rng.randrange(V) for _ in range(3)]),
            output_ids_N=torch.tensor([rng.randrange(V) for _ in range(4)]),
            barred_ids=(),
            supports_CB=supports.bits(support_CV) if top_k else None,
        )
        for first, top_k in ((2, 0), (6, 4))
    ]
    return hidden_SH, layer, token_ids_S, temperatures_S, constrained


def plain(case) -> tuple[Tensor, Tensor]:
    """The same by the formula, in one piece."""
    hidden_SH, layer, token_ids_S, temperatures_S, constrained = case
    rows = list(layer(hidden_SH))
    allowed_SV = torch.ones(S, V, dtype=torch.bool)
    for tokens in constrained:
        for place, row in zip(tokens.at_C, bend(torch.stack([rows[at] for at in tokens.at_C]), tokens), strict=True):
            rows[place] = row
        if tokens.supports_CB is not None:
            allowed_SV[tokens.at_C] = supports.mask(tokens.supports_CB, V, torch.device("cpu"))
    z_SV = torch.stack(rows) / temperatures_S[:, None]
    logp_SV = z_SV.masked_fill(~allowed_SV, -1e30).log_softmax(-1)
    return logp_SV[torch.arange(S), token_ids_S], -(logp_SV.exp() * logp_SV).sum(-1)


@pytest.mark.parametrize("chunk_logits", [1, 25, 10**6], ids=["one by one", "two by two", "in one piece"])
def test_it_is_the_log_softmax_over_the_support_and_its_entropy(case, chunk_logits: int) -> None:
    *sampled, constrained = case
    ours = head.token_logprobs(*sampled, constrained, chunk_logits=chunk_logits)
    for mine, theirs in zip(ours, plain(case), strict=True):
        torch.testing.assert_close(mine, theirs)
    for figure in (0, 1):
        (by_ours,) = torch.autograd.grad(ours[figure].sum(), case[0], retain_graph=True)
        (by_plain,) = torch.autograd.grad(plain(case)[figure].sum(), case[0])
        torch.testing.assert_close(by_ours, by_plain)


def test_free_tokens_go_the_way_they_went(case) -> None:
    hidden_SH, layer, token_ids_S, temperatures_S, constrained = case
    free = [0, 1, 5]
    logprobs_S, entropies_S = head.token_logprobs(hidden_SH, layer, token_ids_S, temperatures_S, constrained)
    alone = chunked_head.token_logprobs(hidden_SH[free], layer, token_ids_S[free], temperatures_S[free])
    assert torch.equal(logprobs_S[free], alone[0]) and torch.equal(entropies_S[free], alone[1])


def test_logits_as_they_are_served_have_the_precision_of_the_head(case) -> None:
    hidden_SH, layer, _, temperatures_S, constrained = case
    low, some = layer.to(torch.bfloat16), constrained[:1]
    hidden_CH, heat_C = hidden_SH[some[0].at_C].detach().bfloat16(), temperatures_S[some[0].at_C].float()
    logits_CV = torch.nn.functional.linear(hidden_CH.float(), low.weight.float(), low.bias.float())
    served = head.bent_logits(hidden_CH, low, heat_C, some, as_served=True)
    assert torch.equal(served, bend(logits_CV.bfloat16().float(), some[0]) / heat_C[:, None])
    assert not torch.equal(served, head.bent_logits(hidden_CH, low, heat_C, some))


def test_a_token_with_one_allowed_successor_has_no_gradient(case) -> None:
    hidden_SH, layer, token_ids_S, temperatures_S, constrained = case
    sole_CV = torch.nn.functional.one_hot(token_ids_S[6:9], V).bool()
    (tokens,) = [one for one in constrained if one.supports_CB is not None]
    sole = ConstrainedTokens(
        tokens.constraints, tokens.at_C, tokens.offsets_C, tokens.prompt_ids_P, tokens.output_ids_N, (),
        supports.bits(sole_CV),
    )  # fmt: skip
    logprobs_S, _ = head.token_logprobs(hidden_SH, layer, token_ids_S, temperatures_S, [sole])
    assert logprobs_S[6:9].tolist() == [0, 0, 0]
    logprobs_S[6:9].sum().backward()
    assert hidden_SH.grad is not None and not hidden_SH.grad.any()
