"""How many tokens fit into the device's memory at once, as this process has learned it."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from trainer.domain.base import BaseModel
from trainer.errors import OutOfMemory
from whetstone.config.trainer import TrainerSettings

FEWEST_TOKENS = 64
"""Of a micro-batch: the least that the settings allow as well."""
MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What RuntimeErrors say that mean it: those of CUDA, MPS and the CPU's allocator, and of cuBLAS for its workspace."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenBudget:
    """Most tokens of a micro-batch; it only falls, and lasts as long as the process."""

    tokens: int
    has_fallen: bool = False
    longest_row: int = 0
    """Tokens of the longest row that was read so far."""
    probed: bool = False
    """Whether a micro-batch of that size was tried at the start."""

    def lower(self, tokens: int) -> None:
        """Take `tokens` where that is less, but FEWEST_TOKENS at least."""
        tokens = max(FEWEST_TOKENS, tokens)
        if tokens < self.tokens:
            log.warning(
                "micro-batches have %d tokens from now on, not %d: the memory of this device, or of another process's, "
                "holds no more. A smaller trainer.micro_batch_tokens saves finding that out, as gradient_checkpointing "
                "may",
                tokens, self.tokens,
            )  # fmt: skip
            self.tokens = tokens
            self.has_fallen = True


@cache
def budget_of(_base: BaseModel, settings: TrainerSettings) -> TokenBudget:
    """Return this process's budget for the model under these settings."""
    return TokenBudget(settings.micro_batch_tokens)


def within(budget: TokenBudget, act: Callable[[], Result]) -> Result:
    """Return what `act` returns. Where memory runs out, halve the budget, which `act` must keep to, and repeat it."""
    while True:
        try:
            return act()
        except Exception as error:
            if not ran_out(error) or budget.tokens == FEWEST_TOKENS:
                raise
        free()
        budget.lower(budget.tokens // 2)


def ran_out(error: BaseException) -> bool:
    """Return whether the error, or what it was raised from, says that memory ran out: the device's or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES):
        return True
    return error.__cause__ is not None and ran_out(error.__cause__)


def free() -> None:
    """Give the device's cached memory back. Call it outside of `except`, where no error holds on to tensors."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        gc.collect()
        torch.mps.empty_cache()


@contextmanager
def needed_to(what: str) -> Iterator[None]:
    """Raise OutOfMemory where memory runs out inside the context."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(
            f"the device's memory does not suffice to {what}. What else uses the device must leave more of it, or the "
            f"trainer needs less: a smaller model or lora_rank, one of fewer bits. ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
