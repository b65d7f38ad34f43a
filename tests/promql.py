"""Which figures a PromQL expression asks for, and by which labels. Reads names; evaluates nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTIONS = frozenset(
    {
        "abs",
        "absent",
        "avg",
        "changes",
        "clamp_max",
        "clamp_min",
        "count",
        "delta",
        "histogram_quantile",
        "increase",
        "irate",
    }
    | {"label_values", "max", "min", "rate", "sum", "time", "topk"}
)
KEYWORDS = frozenset(
    {"and", "bool", "by", "group_left", "group_right", "ignoring", "inf", "nan", "offset", "on", "or", "unless"}
    | {"without"}
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?\s*\{([^}]*)\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_WORD = re.compile(r"(?<![\w.$])[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")
_SINGLE = re.compile(r"^label_values\(([a-zA-Z_:]\w*),\s*(\w+)\)$")


@dataclass(frozen=True)
class Expression:
    """What an expression asks for."""

    names: frozenset[str]
    labels: frozenset[str]
    """In selectors and groupings."""


class NoPromql(ValueError):
    """Brackets do not close, or a function is unknown."""


def read(expression: str) -> Expression:
    """Names and labels of an expression, as far as dashboards and alerts write them.

    Raises:
        NoPromql: it is none, by its brackets or its functions.
    """
    _check_brackets(_STRING.sub('""', expression))
    if single := _SINGLE.match(expression):
        return Expression(frozenset({single[1]}), frozenset({single[2]}))
    labels = set(_labels(expression))
    text = _GROUPING.sub(" ", _RANGE.sub(" ", _SELECTOR.sub(r" \1 ", _STRING.sub('""', expression))))
    names = set()
    for word in _WORD.finditer(text):
        called = text[word.end() :].lstrip()[:1] == "("
        if word[0] in KEYWORDS or (called and word[0] in FUNCTIONS):
            continue
        if called:
            raise NoPromql(f"{word[0]}() is no function that is known here: {expression}")
        names.add(word[0])
    return Expression(frozenset(names), frozenset(labels))


def _labels(expression: str) -> Iterator[str]:
    plain = _STRING.sub('""', expression)
    for _, inside in _SELECTOR.findall(plain):
        yield from _LABEL.findall(inside)
    for _, inside in _GROUPING.findall(plain):
        yield from (label.strip() for label in inside.split(",") if label.strip())


def _check_brackets(text: str) -> None:
    unclosed: list[str] = []
    pairs = {")": "(", "]": "[", "}": "{"}
    for mark in text:
        if mark in pairs.values():
            unclosed.append(mark)
        elif mark in pairs and (not unclosed or unclosed.pop() != pairs[mark]):
            raise NoPromql(f"{mark} closes nothing: {text}")
    if unclosed:
        raise NoPromql(f"{unclosed[-1]} is not closed: {text}")
