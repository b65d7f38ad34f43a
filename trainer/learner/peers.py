"""What a step asks of the processes that take it together. Knows gradients and micro-batches; opens nothing.

A learner is alone (`Alone`), or one of several processes that hold equal learners and each read a part of the rows
(`team.Team`). The weights of tokens in the loss are of the whole step, so gradients and figures only need to be added.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Plan = list[list[int]]
"""Places of rows by micro-batch."""


class Peers(Protocol):
    """The processes of a step, as one of them sees them. All of them call the same methods in the same order."""

    def share(self, plan: Plan, tokens: Callable[[list[int]], int]) -> Plan:
        """Which micro-batches are this process's, one a round; empty in a round that finds it with nothing to do.

        All processes have as many rounds. `tokens` is what a micro-batch costs.
        """

    def agree(self) -> None:
        """Go on if all do.

        Raises:
            PeerFailed: another process has failed since.
        """

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        """Make each weight's gradient the sum of all processes'. Returns the sums of the figures.

        Raises:
            PeerFailed: another process has failed; no gradient was touched.
        """


class Alone:
    """One process, which has nobody to ask."""

    def share(self, plan: Plan, tokens: Callable[[list[int]], int]) -> Plan:
        """All of them, in order."""
        return plan

    def agree(self) -> None:
        """Nobody disagrees."""

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        """They are the sums."""
        return list(figures)
