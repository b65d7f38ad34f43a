"""SQL that the proxy and the judge share: find the completions that apps name in feedback. Reads only."""

from collections import defaultdict
from collections.abc import Collection

from sqlalchemy import Connection, and_, select

from migrations import schema
from whetstone.database.engine import chunks

c, a = schema.completions.c, schema.answer_ids.c

Name = tuple[str, int]
"""An id that an app uses, and the choice that it means where choices share the id."""


def completions_named(connection: Connection, project: str, names: Collection[Name]) -> dict[Name, tuple[str, str]]:
    """Return the completion and the trajectory of each name that is recorded.

    A name's id is that of a completion, of an answer (its choices share it), or of a tool call or an item within an
    answer. If an answer's id repeats, the earliest call has it. An id within answers that several have names none of
    them: a wrong reward is worse than a missing one.
    """
    ids = {name_id for name_id, _ in names}
    columns = select(c.id, c.upstream_id, c.choice, c.trajectory_id).where(c.project == project)
    by_own_id: dict[str, tuple[str, str]] = {}
    by_answer: dict[Name, tuple[str, str]] = {}
    for some in chunks(ids):
        by_own_id |= {row.id: (row.id, row.trajectory_id) for row in connection.execute(columns.where(c.id.in_(some)))}
        # The latest first: the earliest call overwrites the others.
        answers = sorted(connection.execute(columns.where(c.upstream_id.in_(some))), key=lambda row: row.id)
        by_answer |= {(row.upstream_id, row.choice): (row.id, row.trajectory_id) for row in reversed(answers)}
    rest = ids - by_own_id.keys() - {answer_id for answer_id, _ in by_answer}
    by_inner_id = _with_inner_id(connection, project, rest)
    return {
        name: where
        for name in names
        if (where := by_own_id.get(name[0]) or by_answer.get(name) or by_inner_id.get(name[0])) is not None
    }


def _with_inner_id(connection: Connection, project: str, ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return the completion and the trajectory of each id that stands in one answer only."""
    query = (
        select(a.id, c.id.label("completion_id"), c.trajectory_id)
        .join(schema.completions, and_(c.project == a.project, c.id == a.completion_id))
        .where(a.project == project)
    )
    places: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for some in chunks(ids):
        for row in connection.execute(query.where(a.id.in_(some))):
            places[row.id].append((row.completion_id, row.trajectory_id))
    return {inner_id: of_id[0] for inner_id, of_id in places.items() if len(of_id) == 1}
