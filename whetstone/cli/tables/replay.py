"""Build the requests that repeat a recorded trajectory's prompts, and compare their answers with the recorded ones."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from whetstone.calls.words import first_words
from whetstone.cli.tables.trajectory_tables import plain, text_with_calls
from whetstone.transfer.exporting.rows import Completion
from whetstone.transfer.repeat import body_of, why_not_sent

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A recorded call that can be sent again."""

    turn: int
    completion_id: str
    policy_version: int
    body: dict[str, Any]
    """The request without `model`."""
    words: str
    """The first words of what was new in it."""
    answer: str
    """The text of the recorded answer, with its tool calls."""


@dataclass(frozen=True)
class Comparison:
    """A recorded answer, and the one of the version that is compared."""

    turn: int
    completion_id: str
    prompt: str
    before: str
    before_version: int
    after: str | None
    """None if there is no answer."""
    error: str | None
    same: bool


def prompts(trajectory: Row) -> tuple[list[Prompt], dict[int, str]]:
    """Return the calls of a trajectory that can be sent again, and of the other turns why they cannot."""
    names = {field.name for field in fields(Completion)}
    turns = {turn["completion_id"]: turn for turn in trajectory["turns"]}
    by_id = {
        completion_id: Completion(
            **{"id": completion_id}, **{name: value for name, value in turn.items() if name in names}
        )
        for completion_id, turn in turns.items()
    }
    possible, skipped = [], {}
    for completion_id, turn in turns.items():
        completion = by_id[completion_id]
        if (why := why_not_sent(completion)) is not None:
            skipped[turn["turn"]] = why
            continue
        body = body_of(by_id, completion_id, turn["sampling"], turn["end_user"])
        recorded = text_with_calls(completion.answer)
        version = turn["policy_version"]
        possible.append(Prompt(turn["turn"], completion_id, version, body, first_words(turn["new_messages"]), recorded))
    return possible, skipped


def compare(prompt: Prompt, answer: Row) -> Comparison:
    """Compare a recorded answer with the first choice of a new one."""
    choices = answer.get("choices") or [{}]
    after = text_with_calls(choices[0].get("message") or {})
    return _comparison(prompt, after, None)


def failed(prompt: Prompt, error: str) -> Comparison:
    """Return the comparison of a call that got no answer."""
    return _comparison(prompt, None, error)


def shown(comparisons: Sequence[Comparison], skipped: Mapping[int, str], version: str) -> RenderableType:
    """Show the answers that differ, line by line, and a summary."""
    return Group(*_lines(comparisons, skipped, version))


def as_object(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for JSON."""
    return dict(msgspec.to_builtins(comparison))


def _comparison(prompt: Prompt, after: str | None, error: str | None) -> Comparison:
    return Comparison(
        prompt.turn, prompt.completion_id, prompt.words, prompt.answer, prompt.policy_version, after, error,
        same=after == prompt.answer,
    )  # fmt: skip


def _lines(comparisons: Sequence[Comparison], skipped: Mapping[int, str], version: str) -> Iterator[RenderableType]:
    for one in comparisons:
        yield Text(f"turn {one.turn}  {one.prompt}", style="bold", overflow="ellipsis", no_wrap=True)
        if one.error is not None:
            yield Text(f"  no answer: {one.error}", style="red")
        elif one.same:
            yield Text(f"  the same as v{one.before_version}", style="dim")
        else:
            yield from _difference(one, version)
    for turn, why in skipped.items():
        yield Text(f"turn {turn} is left out: {why}", style="dim")
    same = sum(one.same for one in comparisons)
    yield Text(f"{len(comparisons)} prompts sent to {version}: {same} answers are the same", style="bold")


def _difference(one: Comparison, version: str) -> Iterator[RenderableType]:
    yield Text(f"  - v{one.before_version}   + {version}", style="dim")
    before, after = plain(one.before).splitlines(), plain(one.after or "").splitlines()
    for line in difflib.ndiff(before, after):
        style = {"-": "red", "+": "green"}.get(line[0], "")
        if not line.startswith("?"):
            yield Text(f"  {line}", style=style)
