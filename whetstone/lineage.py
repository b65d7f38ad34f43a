"""How versions descend from one another. Pure; knows no table."""

from collections.abc import Mapping


def lineage(version: int, parents: Mapping[int, int | None]) -> list[int]:
    """The version, its parent, and so on to the base model."""
    line = []
    at: int | None = version
    while at is not None:
        line.append(at)
        at = parents[at]
    return line
