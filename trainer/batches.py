"""Lengths in, micro-batches out. Knows counts; nothing of what is in a row."""

from collections.abc import Sequence


def by_length(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Places of rows, grouped so that rows times the longest of them stay within the budget.

    Longest first: what does not fit into memory says so at once, and like lengths waste little on padding. Equal
    lengths keep their order, so the same rows always make the same micro-batches. A row above the budget is alone.
    """
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        # The first of a batch is its longest: its length is what every row of it is padded to.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
