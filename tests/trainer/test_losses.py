import math

import pytest
import torch
from torch import Tensor

from trainer.losses import dppo_tv, entropy, k3, token_logprobs


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_dppo_tv_worked_by_hand() -> None:
    # π     μ     A     r     π - μ
    # 0.5   0.4   1     1.25  +0.1   kept
    # 0.8   0.4   1     2     +0.4   masked: up, and already far up
    # 0.2   0.5  -1     0.4   -0.3   masked: down, and already far down
    # 0.8   0.4  -1     2     +0.4   kept: it leads back
    # 0.2   0.5   1     0.4   -0.3   kept: it leads back
    trainer_S = tensor(0.5, 0.8, 0.2, 0.8, 0.2).log()
    inference_S = tensor(0.4, 0.4, 0.5, 0.4, 0.5).log()
    loss = dppo_tv(trainer_S, inference_S, tensor(1, 1, -1, -1, 1), threshold=0.2, regulariser=0.1, step_tokens=10)
    assert loss.masked_S.tolist() == [False, True, True, False, False]
    policy = -1.25 + 2 - 0.4
    regulariser = 0.1 * (0.01 + 0.16 + 0.09 + 0.16 + 0.09)
    assert loss.loss.item() == pytest.approx((policy + regulariser) / 10, abs=1e-12)


def test_the_gradient_is_that_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer_S = torch.rand(500, generator=generator, dtype=torch.float64).log().requires_grad_()
    inference_S = torch.rand(500, generator=generator, dtype=torch.float64).log()
    advantages_S = torch.randn(500, generator=generator, dtype=torch.float64)
    loss = dppo_tv(trainer_S, inference_S, advantages_S, threshold=0.2, regulariser=1e-3, step_tokens=700)
    loss.loss.backward()

    written_out: list[float] = []
    total = 0.0
    for log_pi, log_mu, advantage in zip(trainer_S.tolist(), inference_S.tolist(), advantages_S.tolist(), strict=True):
        pi, mu = math.exp(log_pi), math.exp(log_mu)
        pushed_further = abs(pi - mu) > 0.2 and advantage * (pi - mu) > 0
        kept = 0.0 if pushed_further else 1.0
        total += (-kept * pi / mu * advantage + 1e-3 * (pi - mu) ** 2) / 700
        # d(π/μ)/d log π = π/μ;  d(π - μ)²/d log π = 2 (π - μ) π
        written_out.append((-kept * pi / mu * advantage + 2e-3 * (pi - mu) * pi) / 700)
    assert trainer_S.grad is not None
    assert 0 < loss.masked_S.sum() < 500
    assert loss.loss.item() == pytest.approx(total, abs=1e-9)
    torch.testing.assert_close(trainer_S.grad, tensor(*written_out), rtol=0, atol=1e-9)


def test_shares_of_a_split_step_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    trainer_S, inference_S = torch.rand(2, 9, generator=generator, dtype=torch.float64).log()
    advantages_S = torch.randn(9, generator=generator, dtype=torch.float64)

    def loss(part: slice) -> float:
        parts = dppo_tv(
            trainer_S[part], inference_S[part], advantages_S[part], threshold=0.2, regulariser=1e-3, step_tokens=9
        )
        return parts.loss.item()

    assert loss(slice(0, 4)) + loss(slice(4, 9)) == pytest.approx(loss(slice(0, 9)), abs=1e-12)


def test_a_masked_token_leaves_no_nan_behind() -> None:
    trainer_S = torch.tensor([-0.1], requires_grad=True)
    loss = dppo_tv(
        trainer_S, torch.tensor([-1000.0]), torch.tensor([1.0]), threshold=0.2, regulariser=0.0, step_tokens=1
    )
    assert loss.loss.item() == 0.0


def test_k3_estimates_the_divergence_from_its_first_argument() -> None:
    sampler, other = tensor(0.7, 0.2, 0.1), tensor(0.5, 0.3, 0.2)
    # Expectation under the sampler, exactly: KL(sampler ‖ other).
    estimate = (sampler * k3(sampler.log(), other.log())).sum().item()
    assert estimate == pytest.approx((sampler * (sampler / other).log()).sum().item(), abs=1e-12)
    assert k3(tensor(-1.0), tensor(-1.0)).item() == 0.0
    assert (k3(sampler.log(), other.log()) > 0).all()


def test_token_logprobs_are_the_log_softmax_at_the_ids() -> None:
    logits_SV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids_S = torch.tensor([0, 6, 3, 3, 1])
    torch.testing.assert_close(token_logprobs(logits_SV, ids_S), logits_SV.log_softmax(-1)[torch.arange(5), ids_S])


def test_entropy_of_a_fair_die_and_of_certainty() -> None:
    logits_SV = torch.tensor([[0.0] * 6, [1000.0] + [0.0] * 5], dtype=torch.float64)
    assert entropy(logits_SV).tolist() == pytest.approx([math.log(6), 0.0], abs=1e-12)
