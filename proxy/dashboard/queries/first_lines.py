"""The dashboard's SQL for lists: the beginning of the first prompt of a trajectory or of a group, and of a trajectory's
last answer, each by an index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from migrations import schema
from migrations.words import response_text
from whetstone.calls.words import LINE, beginning, first_line, one_line

c, t, g = schema.completions.c, schema.trajectories.c, schema.groups.c


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


def group_prompts(connection: Connection, project: str, group_ids: Sequence[str]) -> dict[str, str]:
    """Return the first prompt of any member of each group, by the group's id; without those that have no text."""
    member = (
        select(t.id)
        .where(t.project == g.project, t.group_id == g.id)
        .limit(1)
        .correlate(schema.groups)
        .scalar_subquery()
    )
    members = select(g.project, g.id, member.label("member")).where(g.project == project, g.id.in_(group_ids))
    of = members.subquery("members")
    first = select(of.c.id, beginning(c.new_messages)).where(
        c.project == of.c.project, c.trajectory_id == of.c.member, c.turn == 0
    )
    lines = {name: first_line(text) for name, text in connection.execute(first)} if group_ids else {}
    return {name: line for name, line in lines.items() if line}
