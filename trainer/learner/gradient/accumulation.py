"""Add up the gradient of a step, micro-batch by micro-batch, in as much memory as there is.

A micro-batch whose memory runs out leaves nothing behind: its gradient is collected apart, and added once it is whole.
The token budget is then halved, and its rows are read in smaller micro-batches. Weights in the loss are those of the
whole step, so any split adds up to the same gradient, but for the rounding of sums in another order.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from torch import Tensor

from trainer.domain.rows import Row
from trainer.errors import OutOfMemory
from trainer.learner.forward import Reading
from trainer.learner.gradient import memory
from trainer.learner.gradient.objective import Objective, Sums, Terms

ROW_ATTEMPTS = 3
"""How often a single row is tried whose memory runs out: another program may have had the memory for a moment."""

log = logging.getLogger(__name__)


class Accumulation:
    """Adds gradients up in the `grad` of the weights, within the reading's token budget."""

    def __init__(self, objective: Objective, reading: Reading, weights: Iterable[Tensor]) -> None:
        self._objective = objective
        self._reading = reading
        self._weights = list(weights)

    def add(self, terms: Terms, places: Sequence[int], sums: Sums) -> list[int]:
        """Add the rows' gradient and sums. Return the rows that do not fit into memory even alone; they add nothing.

        Raises:
            OutOfMemory: a row does not fit that should: one as long has fit before, or nothing fits at all.
        """
        budget = self._reading.budget
        parts = [list(places)]
        unfit: list[int] = []
        failures = 0
        while parts:
            part = parts.pop(0)
            several = len(part) > 1
            if several and budget.has_fallen and self._tokens(terms, part) > budget.tokens:
                parts = [*_halves(part), *parts]
            elif self._add_whole(terms, part, sums):
                failures = 0
            elif several:
                budget.lower(self._tokens(terms, part) // 2)
                parts = [*_halves(part), *parts]
            elif (failures := failures + 1) < ROW_ATTEMPTS:
                parts = [part, *parts]
            else:
                self._check_too_long(self._tokens(terms, part))
                failures = 0
                unfit += part
        return unfit

    def accompany(self) -> list[int]:
        """Take part in a round in which this process has no rows, where the base is sharded; return no rows."""
        if self._reading.lockstep.is_sharded:
            before = self._take_gradients()
            try:
                self._objective.accompany()
            finally:
                self._put_gradients(before)
        return []

    def _check_too_long(self, tokens: int) -> None:
        """Raise OutOfMemory unless it is the length of a row that keeps it from fitting."""
        fewest = memory.FEWEST_TOKENS
        if tokens <= self._reading.budget.longest_row or not self._fits(fewest, fewest):
            raise OutOfMemory(
                f"the device's memory does not suffice for a row of {tokens} tokens now: something else uses it"
            )

    def probe(self, longest_row: int) -> None:
        """Lower the budget until the largest micro-batch of a step fits: made-up rows of up to `longest_row` tokens.

        Raises:
            OutOfMemory: not even FEWEST_TOKENS fit.
        """
        budget = self._reading.budget
        tokens = max(budget.tokens, longest_row)
        while not self._fits(tokens, min(tokens, longest_row)):
            if tokens == memory.FEWEST_TOKENS:
                raise OutOfMemory(f"the device's memory does not suffice for a micro-batch of {tokens} tokens")
            tokens = max(memory.FEWEST_TOKENS, tokens // 2)
        log.info("a micro-batch of %d tokens fits into the device's memory", tokens)
        if tokens < longest_row:
            log.warning("rows of %d tokens fit; longer ones, up to trainer.max_row_tokens, perhaps not", tokens)
        budget.lower(tokens)
        budget.probed = True

    def _fits(self, tokens: int, row_tokens: int) -> bool:
        vocabulary = cast(Tensor, self._reading.head.weight).shape[0]
        rows = [_made_up_row(start % vocabulary, row_tokens, vocabulary) for start in range(tokens // row_tokens)]
        terms = self._objective.terms(rows, version_in=0, kind="grpo")
        before = self._take_gradients()
        fits = self._add_whole(terms, range(len(rows)), Sums())
        self._put_gradients(before)
        return fits

    def _take_gradients(self) -> list[Tensor | None]:
        """Leave the weights without a gradient, and return what they had."""
        gradients = [weight.grad for weight in self._weights]
        self._put_gradients([None] * len(gradients))
        return gradients

    def _put_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient

    def _add_whole(self, terms: Terms, places: Sequence[int], sums: Sums) -> bool:
        """Add the rows' gradient and sums; return False, and add nothing, where memory runs out."""
        before = self._take_gradients()
        try:
            sums_10, read = self._objective.backward(terms, places)
            figures = sums_10.tolist()
        except Exception as error:
            self._put_gradients(before)
            # A pass of a sharded base is not repeated by one process alone.
            if not memory.ran_out(error) or self._reading.lockstep.is_sharded:
                raise
            log.warning("no memory for a micro-batch of %d rows, %d tokens", len(places), self._tokens(terms, places))
        else:
            for weight, gradient in zip(self._weights, before, strict=True):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else gradient.add_(weight.grad)
            sums.add(figures, read)
            longest_row = max(len(terms.rows[place].token_ids_T) for place in places)
            self._reading.budget.longest_row = max(self._reading.budget.longest_row, longest_row)
            return True
        memory.free()
        return False

    def _tokens(self, terms: Terms, places: Sequence[int]) -> int:
        return self._reading.tokens([terms.rows[place] for place in places])


def _halves(places: list[int]) -> Iterator[list[int]]:
    yield places[: len(places) // 2]
    yield places[len(places) // 2 :]


def _made_up_row(first_id: int, tokens: int, vocabulary: int) -> Row:
    """Return a row of which all but the first token are sampled. Rows with different first ids share no prefix."""
    return Row(
        trajectory_id=str(first_id),
        token_ids_T=tuple((first_id + place) % vocabulary for place in range(tokens)),
        sampled_T=(False, *(True,) * (tokens - 1)),
        inference_logprobs_T=(math.nan, *(-1.0,) * (tokens - 1)),
        versions_T=(-1, *(0,) * (tokens - 1)),
        temperatures_T=(1.0,) * tokens,
        advantages_T=(0.0, *(1.0,) * (tokens - 1)),
    )
