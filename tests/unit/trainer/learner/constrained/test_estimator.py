"""The mean of a step's gradient over every answer is the gradient of the served policy's mean reward.

One class of bending at a time; every answer of a model of six tokens is listed, so nothing is sampled.
"""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.unit.trainer.learner.constrained.enumeration import (
    END,
    VOCABULARY,
    Policy,
    answers,
    distance,
    make_grammar,
    make_versions,
    possible,
    reward,
    rows_of,
    size,
    step_gradient,
    weigh,
)
from trainer.domain.measured import LEAST_MASS
from trainer.errors import RowError
from whetstone.config.trainer import LossName

BENDING: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.15},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": {"2": 1.5, "3": -2.0}},
    "min_tokens": {"min_tokens": 2},
    "allowed_token_ids": {"allowed_token_ids": [0, 2, 4, END]},
    "all but a grammar": {
        "top_p": 0.95, "top_k": 4, "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": -0.2,
        "repetition_penalty": 1.2, "logit_bias": {"1": 0.5}, "min_tokens": 1, "allowed_token_ids": [0, 1, 2, 4, END],
    },
}  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_versions(tmp_path_factory.mktemp("versions"))


@pytest.mark.parametrize("bending", BENDING.values(), ids=BENDING)
def test_the_mean_gradient_is_that_of_the_served_policy(versions: Path, bending: dict[str, Any]) -> None:
    policy = Policy(versions, 2)
    every, weighed = possible(answers(), weigh(policy, answers(), bending))
    chances = [torch.stack([token.served for token in tokens]).sum().exp() for tokens in weighed]
    assert sum(chances).item() == pytest.approx(1, abs=1e-5)
    exact = policy.gradient(sum(chance * reward(answer) for chance, answer in zip(chances, every, strict=True)))
    ours = step_gradient(versions, 2, rows_of(every, weighed, bending, 2))
    assert size(exact) > 100 * TOLERANCE
    assert distance(ours, exact) < TOLERANCE


@pytest.mark.parametrize("loss", get_args(LossName))
def test_every_loss_has_that_gradient(versions: Path, loss: LossName) -> None:
    """A decided token in a ratio of a whole row or in a normaliser would show."""
    policy, bending = Policy(versions, 2), BENDING["all but a grammar"] | {"top_p": 0.5}
    every, weighed = possible(answers(), weigh(policy, answers(), bending))
    assert any(len(token.support) == 1 for tokens in weighed for token in tokens)
    chances = [torch.stack([token.served for token in tokens]).sum().exp() for tokens in weighed]
    exact = policy.gradient(sum(chance * reward(answer) for chance, answer in zip(chances, every, strict=True)))
    ours = step_gradient(versions, 2, rows_of(every, weighed, bending, 2), loss=loss)
    assert size(exact) > 100 * TOLERANCE
    assert distance(ours, exact) < TOLERANCE


@pytest.mark.parametrize("bending", BENDING.values(), ids=BENDING)
def test_without_its_constraints_the_same_step_is_biased(versions: Path, bending: dict[str, Any]) -> None:
    policy = Policy(versions, 2)
    every, weighed = possible(answers(), weigh(policy, answers(), bending))
    chances = [torch.stack([token.served for token in tokens]).sum().exp() for tokens in weighed]
    exact = policy.gradient(sum(chance * reward(answer) for chance, answer in zip(chances, every, strict=True)))
    naive = step_gradient(versions, 2, rows_of(every, weighed, None, 2))
    assert distance(naive, exact) > 100 * TOLERANCE


@pytest.mark.parametrize("bending", BENDING.values(), ids=BENDING)
def test_from_an_older_version_it_is_the_gradient_of_the_surrogate(versions: Path, bending: dict[str, Any]) -> None:
    """Σ_y μ(y) A(y) Σ_t π(y_t)/μ(y_t), both on the support of μ, which the older adapter gives."""
    sampler, policy = Policy(versions, 1), Policy(versions, 2)
    every, by_sampler = possible(answers(), weigh(sampler, answers(), bending))
    surrogate = torch.zeros(())
    for answer, old, new in zip(every, by_sampler, weigh(policy, every, bending), strict=True):
        chance = math.exp(math.fsum(token.served.item() for token in old))
        ratios = [(n.on(o.support).served - o.served.detach()).exp() for n, o in zip(new, old, strict=True)]
        surrogate = surrogate + chance * reward(answer) * torch.stack(ratios).sum()
    exact = policy.gradient(surrogate)
    rows = rows_of(every, by_sampler, bending, 1)
    ours = step_gradient(versions, 2, rows, {1: versions / "p@v1"})
    assert size(exact) > 100 * TOLERANCE
    assert distance(ours, exact) < TOLERANCE


@pytest.mark.parametrize("sampled_by", [1, 2])
def test_a_grammar_teaches_where_it_left_nine_tenths_and_nothing_else(versions: Path, sampled_by: int) -> None:
    """Σ_y μ'(y) A(y) Σ_t [Z ≥ 0.9] π(y_t)/μ(y_t), all but the mean without the grammar."""
    sampler, policy = Policy(versions, sampled_by), Policy(versions, 2)
    grammar = make_grammar(sampler)
    every, by_sampler = possible(answers(), weigh(sampler, answers(), {}, grammar))
    surrogate = torch.zeros(())
    masses = set()
    for answer, old, new in zip(every, by_sampler, weigh(policy, every, {}, grammar), strict=True):
        chance = math.exp(math.fsum(token.served.item() for token in old))
        for o, n in zip(old, new, strict=True):
            masses.add(round(o.mass.item(), 4))
            if o.mass >= LEAST_MASS:
                surrogate = surrogate + chance * reward(answer) * (n.raw - o.raw.detach()).exp()
    assert min(masses) < LEAST_MASS and any(LEAST_MASS < mass < 0.9999 for mass in masses)
    exact = policy.gradient(surrogate)
    rows = rows_of(every, by_sampler, {"grammar": "response_format"}, sampled_by)
    ours = step_gradient(versions, 2, rows, {1: versions / "p@v1"})
    assert size(exact) > 100 * TOLERANCE
    assert distance(ours, exact) < TOLERANCE


def test_the_bias_of_a_grammar_is_within_its_bound(versions: Path) -> None:
    """Per history, over logits: |ours - exact|₁ ≤ 2 (1 - Z) |E[A | history]|."""
    sampler = Policy(versions, 2)
    every, weighed = possible(answers(), weigh(sampler, answers(), {}, make_grammar(sampler)))
    by_history: dict[tuple[int, ...], list[tuple[float, int, float]]] = {}
    states: dict[tuple[int, ...], Any] = {}
    for answer, tokens in zip(every, weighed, strict=True):
        chance = math.exp(math.fsum(token.served.item() for token in tokens))
        for place, token in enumerate(tokens):
            by_history.setdefault(answer[:place], []).append((chance, answer[place], reward(answer)))
            states[answer[:place]] = token
    seen = 0
    for history, draws in by_history.items():
        state = states[history]
        if state.mass < LEAST_MASS:
            continue
        raw_V = state.z_V.softmax(0).detach()
        served_V = torch.zeros(VOCABULARY)
        served_V[state.support] = raw_V[state.support] / raw_V[state.support].sum()
        total = sum(chance for chance, _, _ in draws)
        ours_V, exact_V = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
        for chance, token, gain in draws:
            one_V = torch.nn.functional.one_hot(torch.tensor(token), VOCABULARY)
            ours_V += chance / total * gain * (one_V - raw_V)
            exact_V += chance / total * gain * (one_V - served_V)
        mean = abs(sum(chance / total * gain for chance, _, gain in draws))
        off = (ours_V - exact_V).abs().sum().item()
        assert off <= 2 * (1 - state.mass.item()) * mean + 1e-6
        seen += off > 1e-3
    assert seen  # the bound was not met by zeros


def test_raw_over_processed_pushes_mass_onto_what_was_never_tried(versions: Path) -> None:
    """A grammar allows two of six tokens, and A < 0 for all: there is nothing to learn, and the naive step does."""

    policy = Policy(versions, 2)
    unlikely = {
        answer[:place]: set(token.z_V.argsort()[:2].tolist())
        for answer, tokens in zip(answers(), weigh(policy, answers(), {}), strict=True)
        for place, token in enumerate(tokens)
    }

    def narrow(output: tuple[int, ...]) -> set[int]:
        return unlikely[output]

    every, weighed = possible(answers(), weigh(policy, answers(), {}, narrow))
    masses = [torch.stack([token.mass for token in tokens]).log().mean() for tokens in weighed]
    towards = policy.gradient(torch.stack(masses).mean())  # raises the mass of what is allowed
    chances = [torch.stack([token.served for token in tokens]).sum().exp() for tokens in weighed]
    exact = policy.gradient(-sum(chances))
    assert size(exact) < TOLERANCE

    naive = step_gradient(versions, 2, rows_of(every, weighed, None, 2, lambda answer: -1.0))
    along = sum((a * b).sum().item() for a, b in zip(naive, towards, strict=True))
    assert (
        size(naive) > 100 * TOLERANCE and along < -100 * TOLERANCE
    )  # away from what is allowed: onto tokens that were never tried

    measured_rows = rows_of(every, weighed, {"grammar": "tools"}, 2, lambda answer: -1.0)
    free = [token.mass >= LEAST_MASS for tokens in weighed for token in tokens]
    assert not any(free)  # so nothing is learned from them
    with pytest.raises(RowError, match="nothing to learn from"):
        step_gradient(versions, 2, measured_rows)
