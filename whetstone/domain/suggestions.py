"""Find the setting that a misspelt key means: among the keys of the same table first, then in all other tables."""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

ALIKE_HERE = 0.7
"""Least similarity of two names, from 0 to 1, for a suggestion within the same table."""
NEARLY_EQUAL = 0.9
"""The same for a name that comes before an equal one in another table."""
ALIKE_ELSEWHERE = 0.8
"""The same between tables, where far more names compete."""


def suggestion(root: type[BaseModel], key: Sequence[str | int]) -> str | None:
    """Return the dotted name of the setting that an unknown `key` most probably means; None if no name is close."""
    *tables, name = (str(part) for part in key)
    keys = [dotted.split(".") for dotted in keys_of(root)]
    elsewhere = {path[-1]: ".".join(path) for path in reversed(keys)}  # of equal names, the first
    siblings = {path[len(tables)] for path in keys if len(path) > len(tables) and _is_within(path, tables)}
    if here := difflib.get_close_matches(name, siblings, n=1, cutoff=NEARLY_EQUAL):
        return ".".join([*tables, *here])
    if name in elsewhere:  # The name is right, but in the wrong table.
        return elsewhere[name]
    if here := difflib.get_close_matches(name, siblings, n=1, cutoff=ALIKE_HERE):
        return ".".join([*tables, *here])
    nearest = difflib.get_close_matches(name, elsewhere, n=1, cutoff=ALIKE_ELSEWHERE)
    return elsewhere[nearest[0]] if nearest else None


def _is_within(path: Sequence[str], tables: Sequence[str]) -> bool:
    return all(part in ("<name>", table) for part, table in zip(path, tables, strict=False))


def keys_of(section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Yield the dotted name of every setting; a table with user-chosen names has `<name>` in their place."""
    for name, field in section.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is None:
            yield f"{path}{name}"
        else:
            is_table = field.annotation in (inner, inner | None)
            yield from keys_of(inner, f"{path}{name}." if is_table else f"{path}{name}.<name>.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the table that a setting contains: itself, as the value of a dictionary, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)
