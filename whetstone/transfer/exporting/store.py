"""SQL of exports: trajectories that a filter matches, and their completions, read in chunks.

The filter is the user's own SQL over `admin_trajectories`; it runs on a read-only connection.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Text, TextClause, and_, func, select, text

from migrations import schema
from whetstone.database.engine import chunks
from whetstone.transfer.exporting.rows import Attempt, Completion, Rating

AT_ONCE = 200
"""Trajectories whose completions one query reads."""
GROUPS_AT_ONCE = 25
STANDING = ("applied", "used", "unused")
"""States of feedback that has a target and that no later feedback replaces."""
_IDS = ("prompt_token_ids", "token_ids", "inference_logprobs")

c, f, t = schema.completions.c, schema.feedback.c, schema.trajectories.c


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories to export."""

    project: str
    policy: str | None = None
    split: str | None = None
    task: str | None = None
    where: str | None = None
    """A condition on the columns of `admin_trajectories`."""
    query: str | None = None
    """A query whose column `trajectory_id` lists them."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An answer that feedback gave as the right one."""

    trajectory_id: str
    completion_id: str
    """The completion that it replaces."""
    message: Any


Read = TypeVar("Read", Attempt, Demonstration, Rating)


class ExportReader:
    """Reads the trajectories that a filter matches, in one snapshot of the database."""

    def __init__(self, connection: Connection, matching: Filter) -> None:
        self._connection = connection
        self._project = matching.project
        self._matches = _condition(matching)

    def in_order(self, *, min_reward: float | None = None) -> Iterator[Sequence[Attempt]]:
        """Yield all of them, the oldest first, in chunks."""
        good = () if min_reward is None else (t.reward >= min_reward,)
        return self._read(_attempts((*self._matches, *good)).order_by(t.created_at, t.id), Attempt)

    def in_groups(self) -> Iterator[Sequence[Sequence[Attempt]]]:
        """Yield those with a reward and a group, by group, the best first; several groups at a time."""
        query = (
            _attempts(self._matches)
            .where(t.group_id.is_not(None), t.reward.is_not(None))
            .order_by(t.group_id, t.reward.desc(), t.created_at.desc(), t.id)
        )
        rows = chain.from_iterable(self._read(query, Attempt))
        members = (list(of_group) for _, of_group in groupby(rows, key=lambda one: one.group_id))
        while some := list(islice(members, GROUPS_AT_ONCE)):
            yield some

    def demonstrations(self) -> Iterator[Sequence[Demonstration]]:
        """Yield the last demonstration that feedback gave for each completion of matching trajectories, in chunks."""
        answered = func.coalesce(f.completion_id, t.tail_completion_id)
        place = func.row_number().over(partition_by=answered, order_by=(f.created_at.desc(), f.id.desc()))
        ranked = (
            select(f.trajectory_id, answered.label("completion_id"), f.demonstration, f.created_at, f.id)
            .add_columns(place.label("place"))
            .join(schema.trajectories, and_(t.project == f.project, t.id == f.trajectory_id))
            .where(f.project == self._project, f.demonstration.is_not(None), f.withdrawn_at.is_(None))
            .where(f.state.in_(STANDING), *self._matches)
            .subquery()
        )
        last = (
            select(ranked.c.trajectory_id, ranked.c.completion_id, ranked.c.demonstration)
            .where(ranked.c.place == 1, ranked.c.completion_id.is_not(None))
            .order_by(ranked.c.created_at, ranked.c.id)
        )
        return self._read(last, Demonstration)

    def ratings(self) -> Iterator[Sequence[Rating]]:
        """Yield the feedback on matching trajectories that names its rater, the oldest first, in chunks."""
        query = (
            select(
                f.id, f.metadata, f.target_kind, f.trajectory_id, f.completion_id, t.group_id, t.policy,
                t.last_version, t.task, t.split, f.reward, f.source, f.comment, f.demonstration, f.key_id, f.state,
                f.created_at,
            )
            .join(schema.trajectories, and_(t.project == f.project, t.id == f.trajectory_id))
            .where(f.project == self._project, f.metadata["rater"].as_string().is_not(None), f.withdrawn_at.is_(None))
            .where(*self._matches)
            .order_by(f.created_at, f.id)
        )  # fmt: skip
        return self._read(query, Rating)

    def attempts(self, trajectory_ids: Collection[str]) -> dict[str, Attempt]:
        """Return these trajectories by id."""
        queries = (_attempts((t.project == self._project, t.id.in_(some))) for some in chunks(trajectory_ids))
        return {row.id: Attempt(*row) for query in queries for row in self._connection.execute(query)}

    def completions(self, trajectory_ids: Collection[str], *, ids: bool = False) -> dict[str, list[Completion]]:
        """Return the completions of each of these trajectories by turn; `ids`: include token ids and logprobs."""
        names = [field.name for field in fields(Completion) if ids or field.name not in _IDS]
        columns = select(c.trajectory_id, *(c[name] for name in names)).where(c.project == self._project)
        by_trajectory: dict[str, list[Completion]] = {trajectory_id: [] for trajectory_id in trajectory_ids}
        for some in chunks(trajectory_ids):
            query = columns.where(c.trajectory_id.in_(some)).order_by(c.trajectory_id, c.turn)
            for trajectory_id, *values in self._connection.execute(query):
                by_trajectory[trajectory_id].append(Completion(**dict(zip(names, values, strict=True))))
        return by_trajectory

    def _read(self, query: Select[Any], kind: type[Read]) -> Iterator[list[Read]]:
        for some in self._connection.execute(query, execution_options={"yield_per": AT_ONCE}).partitions():
            yield [kind(*row) for row in some]


def _attempts(where: Sequence[ColumnElement[bool]]) -> Select[Any]:
    columns = [t.id if field.name == "trajectory_id" else t[field.name] for field in fields(Attempt)]
    return select(*columns).where(*where)


def _condition(matching: Filter) -> tuple[ColumnElement[bool], ...]:
    values = ((t.policy, matching.policy), (t.split, matching.split), (t.task, matching.task))
    conditions = [t.project == matching.project, *(column == value for column, value in values if value is not None)]
    if matching.where is not None:
        view = "(SELECT * FROM admin_trajectories WHERE project = :its_project) AS admin_trajectories"
        where = text(f"SELECT trajectory_id FROM {view} WHERE (\n{_as_it_stands(matching.where)}\n)")
        conditions.append(_named(where.bindparams(its_project=matching.project)))
    if matching.query is not None:
        query = _as_it_stands(matching.query).strip().rstrip(";")
        conditions.append(_named(text(f"SELECT trajectory_id FROM (\n{query}\n) AS named")))
    return tuple(conditions)


def _named(clause: TextClause) -> ColumnElement[bool]:
    return t.id.in_(select(clause.columns(trajectory_id=Text).subquery().c.trajectory_id))


def _as_it_stands(sql: str) -> str:
    """Escape colons, so that they are not read as parameters."""
    return sql.replace(":", r"\:")
