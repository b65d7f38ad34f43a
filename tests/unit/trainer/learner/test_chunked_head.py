"""The head in chunks is the head in one piece, forward and back."""

import pytest
import torch
from torch import Tensor

from trainer.learner import chunked_head
from trainer.learner.chunked_head import in_two, token_logprobs, wide_logits


@pytest.fixture
def case() -> tuple[Tensor, torch.nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(5, 11, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(torch.randn(11, 5, generator=generator, dtype=torch.float64))
    hidden_SH = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    token_ids_S = torch.randint(11, (7,), generator=generator)
    return hidden_SH, head, token_ids_S, 0.5 + torch.rand(7, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("chunk_logits", [1, 25, 10**6], ids=["one by one", "two by two", "in one piece"])
def test_it_is_the_log_softmax_and_its_entropy(case, chunk_logits: int) -> None:
    hidden_SH, head, token_ids_S, temperatures_S = case
    logprobs_S, entropies_S = token_logprobs(hidden_SH, head, token_ids_S, temperatures_S, chunk_logits=chunk_logits)
    plain_SV = (head(hidden_SH) / temperatures_S[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs_S, plain_SV[torch.arange(7), token_ids_S])
    torch.testing.assert_close(entropies_S, -(plain_SV.exp() * plain_SV).sum(-1))


@pytest.mark.parametrize("chunk_logits", [1, 25, 10**6], ids=["one by one", "two by two", "in one piece"])
def test_its_gradient_is_that_of_finite_differences(case, chunk_logits: int) -> None:
    hidden_SH, head, token_ids_S, temperatures_S = case
    assert torch.autograd.gradcheck(
        lambda hidden: token_logprobs(hidden, head, token_ids_S, temperatures_S, chunk_logits=chunk_logits),
        (hidden_SH,),
    )


def test_a_head_in_bf16_computes_in_fp32(case) -> None:
    hidden_SH, head, token_ids_S, temperatures_S = case
    low = head.to(torch.bfloat16)
    hidden_SH = hidden_SH.detach().to(torch.bfloat16)
    logprobs_S, _ = token_logprobs(hidden_SH, low, token_ids_S, temperatures_S.float())
    assert logprobs_S.dtype == torch.float32
    exact_SV = torch.nn.functional.linear(hidden_SH.double(), low.weight.double(), low.bias.double())
    exact_SV = (exact_SV / temperatures_S[:, None]).log_softmax(-1)
    assert (logprobs_S - exact_SV[torch.arange(7), token_ids_S]).abs().max() < 1e-5  # bf16 would be off by 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_in_16_bits_is_the_head_in_fp32_in_slices_of_the_vocabulary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.nn.Linear(4096, 3 * chunked_head.SLICE_WEIGHTS // 4096 // 2, dtype=dtype).requires_grad_(False)
    low.weight.copy_(torch.randn(low.weight.shape, generator=generator) / 64)
    low.bias.copy_(torch.randn(low.bias.shape, generator=generator))
    whole = torch.nn.Linear(*reversed(low.weight.shape)).requires_grad_(False)
    whole.load_state_dict(low.state_dict())
    token_ids_S, temperatures_S = torch.tensor([5, 4000, 6143]), torch.tensor([1.0, 0.7, 1.3])
    states_SH = torch.randn(3, 4096, generator=generator)
    results = []
    for head in (low, whole):
        hidden_SH = states_SH.clone().requires_grad_()
        logprobs_S, entropies_S = token_logprobs(hidden_SH, head, token_ids_S, temperatures_S)
        logits_SV = wide_logits(hidden_SH, head.weight, head.bias)
        (logprobs_S.sum() + 0.1 * entropies_S.sum() + logits_SV.sin().sum()).backward()
        results.append((logprobs_S, entropies_S, logits_SV, hidden_SH.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_gradient_in_two_parts_of_16_bits_is_the_gradient() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-6
    high, low = in_two(numbers)
    assert high.dtype == low.dtype == torch.bfloat16
    assert ((high.double() + low.double() - numbers) / numbers).abs().max() <= 2**-16
    assert ((high.double() - numbers) / numbers).abs().max() > 2**-10  # one part alone is not


def test_certainty_has_no_entropy_and_leaves_no_nan() -> None:
    head = torch.nn.Linear(1, 3, bias=False).requires_grad_(False)
    head.weight.copy_(torch.tensor([[1000.0], [0.0], [0.0]]))
    hidden_SH = torch.ones(1, 1, requires_grad=True)
    logprobs_S, entropies_S = token_logprobs(hidden_SH, head, torch.tensor([0]), torch.ones(1))
    (logprobs_S + entropies_S).sum().backward()
    assert logprobs_S.tolist() == entropies_S.tolist() == [0.0]
    assert hidden_SH.grad is not None and hidden_SH.grad.tolist() == [[0.0]]


def test_no_tokens_are_no_logprobs() -> None:
    head = torch.nn.Linear(4, 3)
    logprobs_S, entropies_S = token_logprobs(torch.zeros(0, 4), head, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert logprobs_S.shape == entropies_S.shape == (0,)
