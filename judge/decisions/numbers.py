"""Compute mean and spread of rewards; the result does not depend on the order of the values. Pure."""

import math
from collections.abc import Collection


def mean(values: Collection[float]) -> float:
    """Return the arithmetic mean; it does not depend on the order of the values."""
    return math.fsum(values) / len(values)


def spread(values: Collection[float]) -> float:
    """Return the population standard deviation; exactly 0 for equal values."""
    middle = mean(values)
    return (
        math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values)) if len(set(values)) > 1 else 0.0
    )
