"""Check JSON values, and repeat objects as vLLM does: with all their keys, in its order. Pure."""

from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
"""Returns whether a value is covered."""


class Object:
    """An object's fields, in the order in which vLLM writes them. A field that is not required may be null."""

    def __init__(self, required: str = "", /, **fields: Check) -> None:
        """`required`: names of fields, separated by spaces. Fields not named here are ignored, as vLLM does."""
        self._required = frozenset(required.split())
        self._fields = fields

    def __call__(self, value: Any) -> bool:
        """Return whether the value is such an object."""
        if not isinstance(value, dict) or not self._required <= value.keys():
            return False
        for name, item in value.items():
            check = self._fields.get(name)
            if check is not None and not (check(item) or (item is None and name not in self._required)):
                return False
        return True

    def repeat(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the object as vLLM repeats it: unknown fields come last."""
        known = {name: repeat(check, value.get(name)) for name, check in self._fields.items()}
        return known | {name: item for name, item in value.items() if name not in known}


class List:
    """A list whose items pass the check."""

    def __init__(self, check: Check, least: int = 0) -> None:
        """`least`: fewest items."""
        self._check, self._least = check, least

    def __call__(self, value: Any) -> bool:
        """Return whether the value is such a list."""
        return isinstance(value, list) and len(value) >= self._least and all(map(self._check, value))

    def repeat(self, value: list[Any]) -> list[Any]:
        """Return the list as vLLM repeats it."""
        return [repeat(self._check, item) for item in value]


class Either:
    """A value that passes one of the checks."""

    def __init__(self, *checks: Check) -> None:
        self._checks = checks

    def __call__(self, value: Any) -> bool:
        """Return whether the value passes one of the checks."""
        return any(check(value) for check in self._checks)

    def repeat(self, value: Any) -> Any:
        """Return the value as vLLM repeats it, by the first check that it passes."""
        return next((repeat(check, value) for check in self._checks if check(value)), value)


def repeat(check: Check, value: Any) -> Any:
    """Return a value that passed the check, as vLLM repeats it in its answer."""
    return check.repeat(value) if value is not None and isinstance(check, Object | List | Either) else value


def is_a(kind: type) -> Check:
    """Return a check for values of this type."""
    return lambda value: isinstance(value, kind)


text = is_a(str)
flag = is_a(bool)
any_object = is_a(dict)
null = is_a(type(None))
anything = is_a(object)


def number(low: float, high: float) -> Check:
    """Return a check for numbers from `low` to `high`."""
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def whole(low: int, high: int) -> Check:
    """Return a check for whole numbers from `low` to `high`."""
    return lambda value: type(value) is int and low <= value <= high


def one_of(*allowed: str) -> Check:
    """Return a check for one of these texts."""
    return lambda value: isinstance(value, str) and value in allowed


def map_of(check: Check) -> Check:
    """Return a check for objects with any keys, whose values pass the check."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def or_null(check: Check) -> Check:
    """Return a check for null, and for what passes this check."""
    return Either(null, check)
