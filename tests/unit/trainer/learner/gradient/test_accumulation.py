"""Memory that runs out in the middle of a step costs time, and changes nothing."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch

from tests.unit.trainer.learner.gradient.shortage import shortage
from trainer.domain.rows import Row
from trainer.errors import OutOfMemory, RowsDoNotFit
from trainer.learner.gradient import memory
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(threads=1, device="cpu", micro_batch_tokens=256, learning_rate=1e-4)
STEPS = 20


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    """What a process has learned of its memory is of that process alone."""
    memory.budget_of.cache_clear()
    yield
    memory.budget_of.cache_clear()


def apart(one: Learner, other: Learner, name: str) -> float:
    """The largest difference of the numbers in a file of both."""
    ours, theirs = (safetensors.torch.load(learner.files()[name]) for learner in (one, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours)


def assert_equal_but_for_rounding(one: Learner, other: Learner) -> None:
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert apart(one, other, name) < 1e-6, name
    assert one.files()["rng.safetensors"] == other.files()["rng.safetensors"]


@pytest.mark.long(part="exact")
def test_out_of_memory_at_random_moments_of_twenty_steps_changes_nothing(tiny_model: Path, make_rows: MakeRows) -> None:
    undisturbed = Learner.fresh(tiny_model, SETTINGS, seed=1)
    before = undisturbed.files()["adapter_model.safetensors"]
    steps = [make_rows(9, seed=step) for step in range(STEPS)]
    figures = [undisturbed.step(rows, 1) for rows in steps]
    assert undisturbed.files()["adapter_model.safetensors"] != before

    disturbed = Learner.fresh(tiny_model, SETTINGS, seed=1)
    rng = random.Random(0)
    at: list[int] = []

    def runs_out(_way: str, _tokens: int) -> bool:
        at[:] = [left - 1 for left in at]
        return 0 in at

    with shortage(runs_out) as moments:
        for rows, figure in zip(steps, figures, strict=True):
            at[:] = rng.choices(range(1, 200), k=2)
            own = disturbed.step(rows, 1)
            assert (own.sampled_tokens, own.rows) == (figure.sampled_tokens, figure.rows)
            assert own.loss == pytest.approx(figure.loss, abs=1e-6)
            assert own.grad_norm == pytest.approx(figure.grad_norm, rel=1e-5)
    ways = [way for way, _ in moments]
    assert len(ways) > 30 and ways.count("forward") > 5 and ways.count("backward") > 5
    assert_equal_but_for_rounding(disturbed, undisturbed)


def test_the_gradient_of_a_micro_batch_that_failed_on_its_way_back_is_dropped(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    rows = make_rows(4)
    for last in (1, 15, 28):  # of the 28 layers of the adapter
        memory.budget_of.cache_clear()
        undisturbed = Learner.fresh(tiny_model, SETTINGS, seed=1)
        expected = undisturbed.step(rows, 1)
        disturbed = Learner.fresh(tiny_model, SETTINGS, seed=1)
        left = [last]

        def runs_out(way: str, _tokens: int, left: list[int] = left) -> bool:
            left[0] -= way == "backward"
            return way == "backward" and left[0] == 0

        with shortage(runs_out) as moments:
            assert disturbed.step(rows, 1).grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert len(moments) == 1
        assert_equal_but_for_rounding(disturbed, undisturbed)


def test_a_device_that_holds_fewer_tokens_is_discovered_once(tiny_model: Path, make_rows: MakeRows) -> None:
    undisturbed, disturbed = (Learner.fresh(tiny_model, SETTINGS, seed=1) for _ in range(2))
    steps = [make_rows(12, seed=step) for step in range(3)]
    read: list[int] = []

    def runs_out(way: str, tokens: int) -> bool:
        read.append(tokens)
        return tokens > 100

    for number, rows in enumerate(steps):
        undisturbed.step(rows, 1)
        with shortage(runs_out) as moments:
            disturbed.step(rows, 1)
        assert bool(moments) == (number == 0)
    assert max(read[-100:]) <= 100
    assert memory.budget_of(disturbed.base, SETTINGS).tokens <= 128
    # Another learner of this process, as after a rejection, begins with that budget.
    other = Learner.fresh(tiny_model, SETTINGS, seed=2)
    with shortage(runs_out) as moments:
        other.step(steps[0], 1)
    assert not moments


def test_a_row_that_does_not_fit_alone_names_its_trajectory_and_moves_nothing(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    learner.step(make_rows(4, seed=1), 0)
    before = learner.files()
    rows = [*make_rows(6), *make_rows(1, seed=9, shortest=200, longest=200)]
    rows[-1] = replace(rows[-1], trajectory_id="long")
    with shortage(lambda _way, tokens: tokens >= 200), pytest.raises(RowsDoNotFit, match="long") as raised:
        learner.step(rows, 0)
    assert raised.value.trajectory_ids == {"long"}
    assert learner.files() == before
    with shortage(lambda _way, tokens: tokens >= 200):
        other = Learner.fresh(tiny_model, SETTINGS, seed=1)
        other.step(make_rows(4, seed=1), 0)
        learner.step(rows[:-1], 0)
        other.step(rows[:-1], 0)
    assert_equal_but_for_rounding(learner, other)  # and no gradient of the failed step is left


def test_a_single_row_is_tried_again_before_it_is_given_up(tiny_model: Path, make_rows: MakeRows) -> None:
    undisturbed, disturbed = (Learner.fresh(tiny_model, SETTINGS, seed=1) for _ in range(2))
    rows = make_rows(1)
    expected = undisturbed.step(rows, 1)
    left = [2]

    def runs_out(way: str, _tokens: int) -> bool:
        left[0] -= way == "backward"
        return left[0] >= 0 and way == "backward"

    with shortage(runs_out) as moments:
        assert disturbed.step(rows, 1) == expected
    assert len(moments) == 2
    assert memory.budget_of(disturbed.base, SETTINGS).tokens == SETTINGS.micro_batch_tokens
    assert disturbed.files() == undisturbed.files()


def test_the_largest_micro_batch_is_tried_before_the_first_step(tiny_model: Path, make_rows: MakeRows) -> None:
    settings = SETTINGS.model_copy(update={"probe_memory": True, "max_row_tokens": 200})
    undisturbed = Learner.fresh(tiny_model, SETTINGS, seed=1)
    expected = undisturbed.step(make_rows(2), 1)
    learner = Learner.fresh(tiny_model, settings, seed=1)
    read: list[int] = []

    def runs_out(_way: str, tokens: int) -> bool:
        read.append(tokens)
        return tokens > 130

    with shortage(runs_out) as moments:
        assert learner.step(make_rows(2), 1) == expected
        assert [tokens for _, tokens in moments] == [200]
        assert read[0] == 200 and 128 in read
        read.clear()
        Learner.fresh(tiny_model, settings, seed=2).step(make_rows(2, seed=2), 1)
        assert 200 not in read
    assert memory.budget_of(learner.base, settings).tokens == 128
    assert learner.files() == undisturbed.files()


@pytest.mark.parametrize("probe_memory", [True, False])
def test_memory_for_nothing_at_all_is_no_fault_of_the_rows(
    tiny_model: Path, make_rows: MakeRows, probe_memory: bool
) -> None:
    learner = Learner.fresh(
        tiny_model, SETTINGS.model_copy(update={"probe_memory": probe_memory, "max_row_tokens": 256}), seed=1
    )
    before = learner.files()
    with shortage(lambda _way, _tokens: True), pytest.raises(OutOfMemory, match="does not suffice for"):
        learner.step(make_rows(2), 1)
    assert learner.files() == before


def test_nor_is_memory_that_has_sufficed_before(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    learner.step(make_rows(4), 1)
    before = learner.files()
    rows = make_rows(1, seed=9, shortest=50, longest=50)
    with shortage(lambda way, _tokens: way == "backward"), pytest.raises(OutOfMemory, match="a row of 50 tokens now"):
        learner.step(rows, 1)
    assert learner.files() == before
    learner.step(rows, 1)


def test_other_errors_are_no_shortage(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)

    def breaks(_way: str, _tokens: int) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with shortage(breaks), pytest.raises(RuntimeError, match="illegal memory access"):
        learner.step(make_rows(4), 1)
    assert memory.budget_of(learner.base, SETTINGS).tokens == 256
