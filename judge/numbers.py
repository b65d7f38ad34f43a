"""Mean and spread of rewards, the same for the same values in any order. Pure."""

import math
from collections.abc import Collection


def mean(values: Collection[float]) -> float:
    """Arithmetic mean; the same for the same values in any order."""
    return math.fsum(values) / len(values)


def spread(values: Collection[float]) -> float:
    """Population standard deviation; exactly 0 for equal values."""
    middle = mean(values)
    return (
        math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values)) if len(set(values)) > 1 else 0.0
    )
