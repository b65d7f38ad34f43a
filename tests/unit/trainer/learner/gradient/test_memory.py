"""What counts as memory that ran out, and what follows."""

import pytest
import torch

from trainer.errors import ModelUnusable, OutOfMemory
from trainer.learner.gradient.memory import FEWEST_TOKENS, TokenBudget, needed_to, ran_out, within


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        MemoryError(),
    ],
)
def test_every_way_of_saying_it_is_understood(error: Exception) -> None:
    assert ran_out(error)


def test_an_error_that_was_made_of_it_is_understood() -> None:
    with pytest.raises(ModelUnusable) as raised:
        try:
            raise torch.OutOfMemoryError
        except RuntimeError as error:
            raise ModelUnusable("a model's own code may raise anything") from error
    assert ran_out(raised.value)


def test_what_torch_itself_says_of_host_memory_is_understood() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert ran_out(raised.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: device-side assert triggered"), ValueError("out of memory"), KeyError("memory")]
)
def test_other_errors_are_others(error: Exception) -> None:
    assert not ran_out(error)


def test_the_budget_only_falls_and_not_below_the_least() -> None:
    budget = TokenBudget(1000)
    budget.lower(1000)
    assert (budget.tokens, budget.has_fallen) == (1000, False)
    budget.lower(400)
    budget.lower(700)
    assert (budget.tokens, budget.has_fallen) == (400, True)
    budget.lower(3)
    assert budget.tokens == FEWEST_TOKENS


def test_what_keeps_to_the_budget_is_repeated_until_it_fits() -> None:
    budget, tried = TokenBudget(1000), []

    def act() -> str:
        tried.append(budget.tokens)
        if budget.tokens > 300:
            raise torch.OutOfMemoryError
        return "done"

    assert within(budget, act) == "done"
    assert tried == [1000, 500, 250]
    with pytest.raises(MemoryError):
        within(budget, lambda: (_ for _ in ()).throw(MemoryError()))
    assert budget.tokens == FEWEST_TOKENS


def test_a_shortage_elsewhere_is_an_error_of_training_that_says_what_to_do() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"to load the model.*a smaller model.*\(CUDA out of memory\)"),
        needed_to("load the model"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore lines")
    with pytest.raises(ValueError, match="other"), needed_to("load the model"):
        raise ValueError("other")
