"""Compare what apps received with what SQL has, for `chaos` and `outage`.

Each request has a number, in its last words; an app's feedback on the answer has it too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, select

from migrations import schema

TOLD = 5
"""Examples in a fault."""


@dataclass
class Heard:
    """What apps received: every answer whose last byte arrived, every feedback that was acknowledged."""

    completions: dict[str, int] = field(default_factory=dict)
    """Completion id -> the number of its request."""
    feedback: dict[str, int] = field(default_factory=dict)
    """Feedback id -> the number of the request it is about."""


@dataclass(frozen=True)
class Stored:
    """What SQL has."""

    completions: Sequence[tuple[str, int]]
    """Id, and the number in its last words."""
    feedback: Sequence[tuple[str, int]]
    taught: Sequence[tuple[str, str]]
    """Step and trajectory, of everything that a step took."""
    steps: Counter[str]
    """State -> number of steps."""


def words_of(number: int) -> str:
    """Return the last words of request `number`; also the comment on its answer."""
    return f"request #{number}"


def stored(engine: Engine) -> Stored:
    """Read all of it from SQL."""
    c, f, m, s = schema.completions.c, schema.feedback.c, schema.step_trajectories.c, schema.steps.c
    with engine.connect() as connection:
        return Stored(
            completions=[
                (row.id, _number_of(row.new_messages[-1]["content"]))
                for row in connection.execute(select(c.id, c.new_messages))
            ],
            feedback=[
                (row.id, _number_of(row.comment))
                for row in connection.execute(select(f.id, f.comment).where(f.comment.is_not(None)))
            ],
            taught=[(row.step_id, row.trajectory_id) for row in connection.execute(select(m.step_id, m.trajectory_id))],
            steps=Counter(connection.execute(select(s.state)).scalars()),
        )


def wrong_with(heard: Heard, said: Stored) -> list[str]:
    """Return what is lost, doubled, or trained on twice."""
    taught = Counter(trajectory for _, trajectory in said.taught)
    return [
        *_lost_or_twice("completions", heard.completions, said.completions),
        *_lost_or_twice("feedback", heard.feedback, said.feedback),
        *_told("trajectories in more than one step", (name for name, times in taught.items() if times > 1)),
    ]


def _lost_or_twice(what: str, held: dict[str, int], found: Sequence[tuple[str, int]]) -> list[str]:
    numbers = dict(found)
    records = Counter(number for _, number in found)
    return [
        *_told(f"{what} that an app holds and SQL has not", (one for one in held if one not in numbers)),
        *_told(
            f"{what} that SQL has under another request",
            (one for one, number in held.items() if numbers.get(one, number) != number),
        ),
        *_told(f"{what} of one request that SQL has twice", (number for number, times in records.items() if times > 1)),
    ]


def _told(what: str, found: Iterable[Any]) -> list[str]:
    ones = sorted(found)
    return [f"{len(ones)} {what}: {', '.join(map(str, ones[:TOLD]))}"] if ones else []


def _number_of(words: str) -> int:
    return int(words.rpartition("#")[2])
