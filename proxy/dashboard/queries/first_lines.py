"""The dashboard's SQL for lists: the beginning of a trajectory's first prompt and of its last answer, each by an
index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from migrations.words import response_text
from whetstone.calls.words import LINE, beginning, first_line, one_line

c = schema.completions.c


@dataclass(frozen=True)
class FirstLines:
    """What a trajectory is about, in two lines; empty where there is no text."""

    prompt: str = ""
    answer: str = ""


def first_lines(
    connection: Connection, project: str, trajectories: Sequence[Mapping[str, Any]]
) -> dict[str, FirstLines]:
    """Return the lines of each trajectory by its id. The rows have `id` and `tail_completion_id`."""
    ids = [row["id"] for row in trajectories]
    tails = [row["tail_completion_id"] for row in trajectories if row["tail_completion_id"] is not None]
    first = select(c.trajectory_id, beginning(c.new_messages)).where(
        c.project == project, c.trajectory_id.in_(ids), c.turn == 0
    )
    last = select(c.trajectory_id, beginning(response_text, 4 * LINE)).where(c.project == project, c.id.in_(tails))
    prompts = {name: first_line(text) for name, text in connection.execute(first)} if ids else {}
    answers = {name: one_line(text or "") for name, text in connection.execute(last)} if tails else {}
    return {name: FirstLines(prompts.get(name, ""), answers.get(name, "")) for name in ids}
