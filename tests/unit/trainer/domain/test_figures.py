"""What a step tells of itself; and k3 in plain numbers, as the learner has it in tensors."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from migrations import schema
from trainer.domain.claims import Member
from trainer.domain.figures import StepFigures, mean_k3, step_columns, timed
from trainer.domain.row_builder import build_rows
from trainer.domain.rows import SampledCompletion
from trainer.learner.losses import k3
from whetstone.config.trainer import TrainerSettings

FIGURES = StepFigures(
    loss=0.1, kl=0.2, entropy=1.0, mismatch_k3=None, fresh_share=0.0, masked_share=0.25,
    effective_share=0.5, grad_norm=2.0, sampled_tokens=6, read_tokens=24, rows=3, learning_rate=0.5,
)  # fmt: skip
LOGPROBS = st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), min_size=1, max_size=20)


def turn(prompt: tuple[int, ...]) -> SampledCompletion:
    return SampledCompletion("c", prompt, (3,), (-0.5,), 0, 1.0)


def members(*rewards: float) -> list[Member]:
    """One group; each speaks twice, and the second turn extends the first."""
    spoken = (turn((1, 2)), turn((1, 2, 3, 4)))
    return [Member(str(place), "g", reward, spoken) for place, reward in enumerate(rewards)]


def test_a_step_tells_every_figure_under_the_name_of_its_column() -> None:
    three = members(0.0, 0.0, 3.0)
    columns = step_columns(FIGURES, three, build_rows(three, 64), "grpo", TrainerSettings(loss="cispo"))
    assert columns.keys() <= {column.name for column in schema.steps.columns}
    assert columns == asdict(FIGURES) | {
        "loss_function": "cispo", "reward_mean": 1.0, "reward_spread": pytest.approx(2**0.5),
        "advantage_spread": pytest.approx(2**0.5), "completions": 6, "state_share": None,
    }  # fmt: skip
    by_state = build_rows(three, 64, baseline="state")
    assert step_columns(FIGURES, three, by_state, "grpo", TrainerSettings())["state_share"] == 1.0


def test_advantages_of_trajectories_that_are_left_out_do_not_spread_it() -> None:
    three = members(0.0, 3.0, 1.5)
    silent = Member("silent", "g", 99.0, (), silent="greedy")
    alone = Member("s", "of s", 1.0, three[0].completions, alone=True, baseline=None)
    columns = step_columns(FIGURES, [*three, alone], build_rows([*three, alone], 64), "grpo", TrainerSettings())
    assert columns["advantage_spread"] == pytest.approx(math.sqrt(1.5))
    assert columns["completions"] == 6
    with_silent = step_columns(FIGURES, [*three, silent], build_rows([*three, silent], 64), "grpo", TrainerSettings())
    assert with_silent["completions"] == 6


def test_a_supervised_step_tells_nothing_of_rewards_and_sampling() -> None:
    columns = step_columns(FIGURES, [], build_rows([], 64), "sft", TrainerSettings(loss="gspo"))
    assert columns["loss_function"] == "nll"
    of_sampling = ("reward_mean", "reward_spread", "advantage_spread", "fresh_share", "masked_share", "effective_share")
    assert [columns[name] for name in of_sampling] == [None] * 6


def test_spreads_are_those_of_the_population() -> None:
    columns = step_columns(FIGURES, members(-5e5, 5e5), build_rows(members(-5e5, 5e5), 64), "grpo", TrainerSettings())
    assert columns["reward_mean"] == 0.0
    assert columns["reward_spread"] == columns["advantage_spread"] == pytest.approx(5e5)


def test_what_trained_on_nothing_has_no_rate() -> None:
    assert timed(2.0, {"read": 0.5}) == {"seconds": 2.0, "phases": {"read": 0.5}, "tokens_per_s": None}
    assert timed(2.0, {}, 100)["tokens_per_s"] == 50.0


@given(LOGPROBS)
def test_k3_is_the_learners_in_double_precision(pairs: list[tuple[float, float]]) -> None:
    inference, trainer = zip(*pairs, strict=True)
    here = torch.tensor(trainer, dtype=torch.float64), torch.tensor(inference, dtype=torch.float64)
    assert mean_k3(inference, trainer) == pytest.approx(k3(here[1], here[0]).mean().item(), rel=1e-9, abs=1e-12)
    assert mean_k3(inference, inference) == 0.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e4])
def test_what_is_not_a_logprob_makes_no_finite_mean(wrong: float) -> None:
    assert not math.isfinite(mean_k3([-0.5, -1.0], [-0.5, wrong]))
    assert not math.isfinite(mean_k3([], []))
