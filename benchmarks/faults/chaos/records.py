"""Compare what apps received with what SQL has, for `chaos` and `outage`.

Each request has a number, in its last words; an app's feedback on the answer has it too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, select

from migrations import schema

EXAMPLES = 5
"""Examples in a fault."""


@dataclass
class AppLedger:
    """What apps received: every answer whose last byte arrived, every feedback that was acknowledged."""

    completions: dict[str, int] = field(default_factory=dict)
    """Completion id -> the number of its request."""
    feedback: dict[str, int] = field(default_factory=dict)
    """Feedback id -> the number of the request it is about."""


@dataclass(frozen=True)
class SqlLedger:
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


def read_ledger(engine: Engine) -> SqlLedger:
    """Read the ledger from SQL."""
    c, f, m, s = schema.completions.c, schema.feedback.c, schema.step_trajectories.c, schema.steps.c
    with engine.connect() as connection:
        return SqlLedger(
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


def wrong_with(received: AppLedger, ledger: SqlLedger) -> list[str]:
    """Return what is lost, doubled, or trained on twice."""
    taught = Counter(trajectory for _, trajectory in ledger.taught)
    return [
        *_lost_or_twice("completions", received.completions, ledger.completions),
        *_lost_or_twice("feedback", received.feedback, ledger.feedback),
        *_fault("trajectories in more than one step", (name for name, times in taught.items() if times > 1)),
    ]


def _lost_or_twice(what: str, received: dict[str, int], stored: Sequence[tuple[str, int]]) -> list[str]:
    numbers = dict(stored)
    records = Counter(number for _, number in stored)
    return [
        *_fault(f"{what} that an app holds and SQL has not", (one for one in received if one not in numbers)),
        *_fault(
            f"{what} that SQL has under another request",
            (one for one, number in received.items() if numbers.get(one, number) != number),
        ),
        *_fault(
            f"{what} of one request that SQL has twice", (number for number, times in records.items() if times > 1)
        ),
    ]


def _fault(what: str, items: Iterable[Any]) -> list[str]:
    ordered = sorted(items)
    return [f"{len(ordered)} {what}: {', '.join(map(str, ordered[:EXAMPLES]))}"] if ordered else []


def _number_of(words: str) -> int:
    return int(words.rpartition("#")[2])
