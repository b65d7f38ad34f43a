"""The proxy's SQL for stored responses: read one with the conversation before it, and forget one."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Engine, Executable, and_, bindparam, func, literal, select

from migrations import schema
from proxy.domain.stored_turn import StoredTurn
from whetstone.database.bulk import among, listed
from whetstone.database.types import storable

_ENDPOINT = "responses"
c, e = schema.completions.c, schema.erased_responses.c

_COLUMNS = (
    c.upstream_id,
    c.new_messages,
    c.response,
    c.tools,
    c.sampling,
    c.streamed,
    c.redactions,
    c.stored_response,
)


def _conversation() -> Executable:
    """Return the query for a response and the turns that it follows, the oldest first: one query, however many."""
    latest = select(func.max(c.id)).where(
        c.project == bindparam("its_project"), c.upstream_id == bindparam("its_id"), c.endpoint == _ENDPOINT
    )
    head = select(c.id, c.follows, literal(0).label("up")).where(
        c.project == bindparam("its_project"), c.id == latest.scalar_subquery()
    )
    turns = head.cte("turns", recursive=True)
    earlier = schema.completions.alias("earlier")
    turns = turns.union_all(
        select(earlier.c.id, earlier.c.follows, turns.c.up + 1).where(
            earlier.c.project == bindparam("its_project"), earlier.c.id == turns.c.follows
        )
    )
    joined = schema.completions.join(turns, and_(c.project == bindparam("its_project"), c.id == turns.c.id))
    return select(*_COLUMNS).select_from(joined).order_by(turns.c.up.desc())


# Built once: to build a statement costs as much as to execute it.
_CONVERSATION = _conversation()


class ResponseTables:
    """The queries of `inference.stored_responses`, for one project."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._dialect = engine.dialect.name
        self._project = project

    def conversation(self, response_id: str) -> list[StoredTurn]:
        """Return a response and the turns before it in its conversation, the oldest first; none if it is unknown."""
        with self._reader.connect() as connection:
            rows = connection.execute(
                _CONVERSATION, {"its_project": self._project, "its_id": storable(response_id)}
            ).all()
        return [_turn(row) for row in rows]

    def turns(self, response_ids: Collection[str]) -> dict[str, StoredTurn]:
        """Return those of these responses that are known, by id, each without the turns before it."""
        query = (
            select(*_COLUMNS)
            .where(c.project == self._project, c.endpoint == _ENDPOINT, among(self._dialect, c.upstream_id))
            .order_by(c.id)
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query, {"ids": listed(self._dialect, storable(list(response_ids)))}).all()
        return {row.upstream_id: _turn(row) for row in rows}

    def erased(self, response_ids: Collection[str]) -> set[str]:
        """Return those of these responses that were erased."""
        query = select(e.id).where(e.project == self._project, among(self._dialect, e.id))
        with self._reader.connect() as connection:
            return set(
                connection.execute(query, {"ids": listed(self._dialect, storable(list(response_ids)))}).scalars()
            )

    def forget(self, connection: Connection, response_id: str) -> None:
        """Make a response unknown to later requests. Its call stays recorded."""
        here = (c.project == self._project, c.upstream_id == response_id, c.endpoint == _ENDPOINT)
        connection.execute(schema.completions.update().where(*here).values(stored_response=None))


def _turn(row: Any) -> StoredTurn:
    return StoredTurn(
        response_id=row.upstream_id,
        new_messages=row.new_messages or [],
        response=row.response,
        tools=row.tools,
        sampling=row.sampling,
        streamed=row.streamed,
        redactions=row.redactions,
        stored=row.stored_response,
    )
