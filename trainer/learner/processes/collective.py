"""The interface between a step and the processes that take it together.

A learner is alone (`Alone`), or one of several processes that hold equal learners and each read a part of the rows
(`team.Team`). The token weights in the loss are those of the whole step, so gradients and figures only need to be
added.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

Value = TypeVar("Value")
Plan = list[list[int]]
"""Row positions by micro-batch."""


class Collective(Protocol):
    """The processes of a step, as one of them sees them. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def share(self, plan: Plan, tokens: Callable[[list[int]], int]) -> Plan:
        """Return this process's micro-batches, one per round; empty in a round in which it has nothing to do.

        All processes have the same number of rounds. `tokens` returns the cost of a micro-batch.
        """

    def exchange(self, value: Value) -> list[Value]:
        """Return the values of all processes, in an order that is the same for all.

        Raises:
            PeerFailed: another process has failed since.
        """

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        """Make each weight's gradient the sum over all processes. Return the sums of the figures.

        Raises:
            PeerFailed: another process has failed; no gradient was changed.
        """


class Alone:
    """A single process, without peers."""

    rank = 0
    size = 1

    def share(self, plan: Plan, tokens: Callable[[list[int]], int]) -> Plan:
        """Return all micro-batches, in order."""
        return plan

    def exchange(self, value: Value) -> list[Value]:
        """Return the value: there are no peers that could have another, or could have failed."""
        return [value]

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        """Return the figures: they are the sums already."""
        return list(figures)
