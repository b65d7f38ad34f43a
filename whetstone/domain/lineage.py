"""Find how versions descend from one another."""

from collections.abc import Mapping


def lineage(version: int, parents: Mapping[int, int | None]) -> list[int]:
    """Return the version, its parent, and so on down to the base model."""
    line = []
    at: int | None = version
    while at is not None:
        line.append(at)
        at = parents[at]
    return line
