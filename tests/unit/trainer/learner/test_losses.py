"""Losses worked by hand, one token at a time. That they equal another library's own is shown in tests/trainer/trl."""

import math

import pytest
import torch
from torch import Tensor

from trainer.learner.losses import (
    CLIPS,
    Loss,
    PolicyLoss,
    Tokens,
    cispo,
    clipped,
    dppo_tv,
    gspo,
    guarded,
    k3,
    nll,
    policy_loss,
    weight,
)
from whetstone.config.trainer import LossName, TrainerSettings

NAMES: list[LossName] = ["dppo_tv", "cispo", "dapo", "grpo", "dr_grpo", "gspo"]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    trainer: list[float], inference: list[float], advantages: list[float], rows: list[int] | None = None
) -> Tokens:
    """From probabilities."""
    sequences = torch.tensor(rows or [0] * len(trainer))
    return Tokens(tensor(*trainer).log().requires_grad_(), tensor(*inference).log(), tensor(*advantages), sequences)


def random_tokens(count: int, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    trainer_S = torch.rand(count, generator=generator, dtype=torch.float64).log().requires_grad_()
    inference_S = torch.rand(count, generator=generator, dtype=torch.float64).log()
    advantages_S = torch.randn(count, generator=generator, dtype=torch.float64)
    return Tokens(trainer_S, inference_S, advantages_S, torch.arange(count) // 7)


def by_trainer(loss: PolicyLoss, of: Tokens) -> list[float]:
    """d Σ ℓ / d log π, of each token."""
    (gradient_S,) = torch.autograd.grad(loss.losses_S.sum(), of.trainer_logprobs_S, materialize_grads=True)
    values: list[float] = gradient_S.tolist()
    return values


def test_dppo_tv_worked_by_hand() -> None:
    # π     μ     A     r     π - μ
    # 0.5   0.4   1     1.25  +0.1   kept
    # 0.8   0.4   1     2     +0.4   masked: up, and already far up
    # 0.2   0.5  -1     0.4   -0.3   masked: down, and already far down
    # 0.8   0.4  -1     2     +0.4   kept: it leads back
    # 0.2   0.5   1     0.4   -0.3   kept: it leads back
    of = tokens([0.5, 0.8, 0.2, 0.8, 0.2], [0.4, 0.4, 0.5, 0.4, 0.5], [1, 1, -1, -1, 1])
    loss = dppo_tv(of, low=0.2, high=0.2, regulariser=0.1)
    assert loss.masked_S.tolist() == [False, True, True, False, False]
    squares = [0.01, 0.16, 0.09, 0.16, 0.09]
    policy = [-1.25, 0, 0, 2, -0.4]
    assert loss.losses_S.tolist() == pytest.approx([p + 0.1 * s for p, s in zip(policy, squares, strict=True)])
    # d(π/μ)/d log π = π/μ;  d(π - μ)²/d log π = 2 (π - μ) π
    pulls = [2 * 0.1 * m * p for m, p in zip([0.1, 0.4, -0.3, 0.4, -0.3], [0.5, 0.8, 0.2, 0.8, 0.2], strict=True)]
    assert by_trainer(loss, of) == pytest.approx([p + q for p, q in zip(policy, pulls, strict=True)])


def test_dppo_tv_has_a_bound_on_each_side() -> None:
    of = tokens([0.5, 0.3], [0.4, 0.4], [1, -1])
    assert dppo_tv(of, low=0.05, high=0.2, regulariser=0).masked_S.tolist() == [False, True]
    assert dppo_tv(of, low=0.2, high=0.05, regulariser=0).masked_S.tolist() == [True, False]


def test_cispo_worked_by_hand() -> None:
    # r 1.25, 8 (cut to 5), 0.4 (no bound below); the weight is a constant: the gradient is -w·A
    of = tokens([0.5, 0.8, 0.2], [0.4, 0.1, 0.5], [1, 2, -1])
    loss = cispo(of, high=5)
    assert loss.losses_S.tolist() == pytest.approx([-1.25 * math.log(0.5), -5 * 2 * math.log(0.8), 0.4 * math.log(0.2)])
    assert by_trainer(loss, of) == pytest.approx([-1.25, -10, 0.4])
    assert not loss.masked_S.any()


def test_the_clipped_surrogate_worked_by_hand() -> None:
    # r     A    min(r·A, clip(r, 0.8, 1.28)·A)
    # 1.25  1    1.25
    # 2     1    1.28     clipped
    # 0.4  -1   -0.8      clipped
    # 2    -1   -2        the worse of the two: it leads back
    # 0.4   1    0.4
    of = tokens([0.5, 0.8, 0.2, 0.8, 0.2], [0.4, 0.4, 0.5, 0.4, 0.5], [1, 1, -1, -1, 1])
    loss = clipped(of, low=0.2, high=0.28)
    assert loss.losses_S.tolist() == pytest.approx([-1.25, -1.28, 0.8, 2, -0.4])
    assert loss.masked_S.tolist() == [False, True, True, False, False]
    assert by_trainer(loss, of) == pytest.approx([-1.25, 0, 0, 2, -0.4])


def test_gspo_worked_by_hand() -> None:
    # Row 0: ratios 2 and 1/2, so s = exp(0) = 1. Row 1: ratio 4 and 1, so s = exp(log(4) / 2) = 2, clipped for A = 1.
    of = tokens([0.4, 0.2, 0.8, 0.3], [0.2, 0.4, 0.2, 0.3], [3, 3, 1, 1], [0, 0, 1, 1])
    loss = gspo(of, low=0.1, high=0.1)
    assert loss.losses_S.tolist() == pytest.approx([-3, -3, -1.1, -1.1])
    assert loss.masked_S.tolist() == [False, False, True, True]
    # Two tokens of one row: d(2 · -s·A)/d log π_t = -2·A·s/2.
    assert by_trainer(loss, of) == pytest.approx([-3, -3, 0, 0])


def test_the_likelihood_worked_by_hand() -> None:
    logprobs_S = tensor(0.5, 0.1).log()
    assert nll(logprobs_S).losses_S.tolist() == pytest.approx([math.log(2), math.log(10)])


def test_normalisers_worked_by_hand() -> None:
    # Two trajectories of 3 and 5 sampled tokens.
    def of(name: LossName, trajectory_tokens: int) -> float:
        return weight(name, trajectory_tokens=trajectory_tokens, trajectories=2, step_tokens=8, max_answer_tokens=16)

    for name in ("dppo_tv", "cispo", "dapo"):
        assert (of(name, 3), of(name, 5)) == (1 / 8, 1 / 8)
    for name in ("grpo", "gspo"):
        assert (of(name, 3), of(name, 5)) == (1 / 6, 1 / 10)
    assert (of("dr_grpo", 3), of("dr_grpo", 5)) == (1 / 32, 1 / 32)


def loss_of(name: LossName) -> Loss:
    return policy_loss(name, None, None, 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: LossName) -> None:
    # Per-token losses only meet in gspo, so a sum is checked; bounds are not met exactly, and cispo's weight is fixed.
    of = random_tokens(40)

    def total(trainer_S: Tensor) -> Tensor:
        return loss_of(name)(Tokens(trainer_S, of.inference_logprobs_S, of.advantages_S, of.sequences_S)).losses_S.sum()

    if name == "cispo":
        weights_S = (of.trainer_logprobs_S - of.inference_logprobs_S).detach().exp().clamp(max=5)
        assert by_trainer(loss_of(name)(of), of) == pytest.approx((-weights_S * of.advantages_S).tolist())
    else:
        assert torch.autograd.gradcheck(total, (of.trainer_logprobs_S,))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_just_sampled_is_followed_by_its_advantage(name: LossName) -> None:
    # At π = μ every one of them is the plain policy gradient: -A for each token.
    spoken = random_tokens(14)
    of = Tokens(spoken.trainer_logprobs_S, spoken.trainer_logprobs_S.detach(), spoken.advantages_S, torch.arange(14))
    loss = loss_of(name)(of)
    assert by_trainer(loss, of) == pytest.approx((-of.advantages_S).tolist())
    assert not loss.masked_S.any()


@pytest.mark.parametrize("name", NAMES)
def test_its_paper_sets_its_bounds_unless_the_settings_do(name: LossName) -> None:
    of = random_tokens(60)
    low, high = CLIPS[name]
    by_paper = loss_of(name)(of).losses_S
    assert torch.equal(by_paper, policy_loss(name, low, high, 1e-3)(of).losses_S)
    assert not torch.equal(by_paper, policy_loss(name, low / 2, high / 2, 1e-3)(of).losses_S)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_beyond_the_guard_adds_nothing_and_leaves_no_nan_behind(name: LossName) -> None:
    trainer_S = torch.tensor([-0.1, -1.0], requires_grad=True)
    of = Tokens(trainer_S, torch.tensor([-1000.0, -1.1]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]))
    loss = guarded(of, loss_of(name), 1000)
    assert loss.masked_S.tolist()[0]
    assert loss.losses_S.tolist()[0] == 0.0
    gradient = by_trainer(loss, of)
    assert gradient[0] == 0.0
    assert gradient[1] == pytest.approx(by_trainer(loss_of(name)(of), of)[1])


def test_by_default_no_token_weighs_more_than_eight() -> None:
    ratios = torch.tensor([1.0, 7.9, 8.1, 150.0])
    inference_S = torch.tensor([0.001]).log().expand(4)
    of = Tokens((inference_S + ratios.log()).requires_grad_(), inference_S, torch.ones(4), torch.zeros(4).long())
    loss = guarded(of, loss_of("dppo_tv"), TrainerSettings().max_ratio)
    assert loss.masked_S.tolist() == [False, False, True, True]
    assert by_trainer(loss, of) == pytest.approx([-1.0, -7.9, 0.0, 0.0], rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_has_moved_too_far_is_left_out_whole_whichever_way(name: LossName) -> None:
    # Geometric means: 1.5, 1.1 and 1/1.5, of tokens of which none stands out.
    ratios, rows = torch.tensor([1.5, 1.5, 0.8, 1.5125, 0.5, 0.8889]), torch.tensor([0, 0, 1, 1, 2, 2])
    inference_S = torch.tensor([0.1]).log().expand(6)
    of = Tokens((inference_S + ratios.log()).requires_grad_(), inference_S, torch.tensor([1.0, -1] * 3), rows)
    loss = guarded(of, loss_of(name), 8, 1.4)
    left_out = [True, True, False, False, True, True]
    assert [masked and not loss for masked, loss in zip(loss.masked_S, loss.losses_S, strict=True)][:2] == [True] * 2
    assert [bool(masked) for masked, out in zip(loss.masked_S, left_out, strict=True) if out] == [True] * 4
    gradient = by_trainer(loss, of)
    assert [gradient[place] for place in (0, 1, 4, 5)] == [0.0] * 4
    alone = Tokens(of.trainer_logprobs_S[2:4], inference_S[2:4], of.advantages_S[2:4], torch.tensor([0, 0]))
    assert loss.losses_S[2:4].tolist() == pytest.approx(loss_of(name)(alone).losses_S.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_within_the_guard_nothing_changes(name: LossName) -> None:
    of = random_tokens(60)
    free, held = loss_of(name)(of), guarded(of, loss_of(name), 1e9)
    assert torch.equal(free.losses_S, held.losses_S)
    assert torch.equal(free.masked_S, held.masked_S)


def test_a_masked_token_whose_ratio_overflows_leaves_no_nan_behind() -> None:
    trainer_S = torch.tensor([-0.1], requires_grad=True)
    of = Tokens(trainer_S, torch.tensor([-1000.0]), torch.tensor([1.0]), torch.tensor([0]))
    loss = dppo_tv(of, low=0.2, high=0.2, regulariser=0.0)
    assert loss.losses_S.item() == 0.0
    assert by_trainer(loss, of) == [0.0]


def test_k3_estimates_the_divergence_from_its_first_argument() -> None:
    sampler, other = tensor(0.7, 0.2, 0.1), tensor(0.5, 0.3, 0.2)
    # Expectation under the sampler, exactly: KL(sampler ‖ other).
    estimate = (sampler * k3(sampler.log(), other.log())).sum().item()
    assert estimate == pytest.approx((sampler * (sampler / other).log()).sum().item(), abs=1e-12)
    assert k3(tensor(-1.0), tensor(-1.0)).item() == 0.0
    assert (k3(sampler.log(), other.log()) > 0).all()
