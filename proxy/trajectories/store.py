"""The proxy's SQL for trajectories: find the completion that a request continues, and list the writing proxies."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, and_, bindparam, func, or_, select
from sqlalchemy.exc import SQLAlchemyError

from migrations import schema
from migrations.words import response_text
from proxy.domain.address import NAMED
from proxy.domain.policies import Pin, Pins, and_then
from proxy.trajectories.indexes import OpenCompletion, Repeatable, TrajectoryState, name_of
from proxy.trajectories.rewriting import marks_of
from whetstone.database.change_detector import Changes
from whetstone.database.engine import insert_new
from whetstone.domain.conversation_hash import HISTORY_BYTES, prompt_of
from whetstone.domain.states import TrajectoryStatus

MOST_FREE = 50
"""Most free heads read at once; more with the same history are read when these are taken."""
MOST_OF_PROMPT = 65
"""Most heads with the same prompt read at once, the latest: one more than are compared with a rewritten answer."""
LOOK_UP_S = 5.0
"""How long a call waits for the database to look up its trajectory."""
AWAY_S = 1.0
"""After a failed lookup the database is not queried again for so long."""

c, t, p = schema.completions.c, schema.trajectories.c, schema.proxies.c

_HEADS = select(
    *(c.id, c.upstream_id, c.choice, c.trajectory_id, c.history, c.tool_history, c.continued_by),
    *(c.response, c.policy, c.policy_version, c.created_at, t.state, t.last_seen_at),
).select_from(schema.completions.join(schema.trajectories, and_(t.project == c.project, t.id == c.trajectory_id)))
"""Completions that a request may continue."""
_SOUGHT_ID = func.coalesce(c.id, "")
"""The id, where a history is looked for: SQLite would rather read all recent completions in the order of their ids."""

# Built once: it runs several times a second.
_REPORTS = select(p.id, p.written_until, p.seen_at).where(
    p.project == bindparam("its_project"), p.seen_at >= bindparam("since")
)

Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")

log = logging.getLogger(__name__)


class ThreadTables:
    """The queries of `trajectories.resolver` and `trajectories.peers`, for one project. While the database cannot be
    reached, earlier calls are unknown."""

    def __init__(self, engine: Engine, project: str, changes: Changes | None = None) -> None:
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._away_until = 0.0
        """The database is not queried again before this time (monotonic seconds)."""

    async def heads(
        self, histories: Sequence[bytes], tool_calls: bytes | None, since_s: float
    ) -> list[OpenCompletion] | None:
        """Return completions with one of these histories, the oldest first: free completions whose trajectory is open
        and was seen since `since_s`, and among all others the last one for each history. None: the database cannot be
        reached."""
        return await self._answered(lambda: self._heads(histories, tool_calls, since_s), None)

    async def heads_of_prompts(self, prompts: Sequence[bytes], since_s: float) -> list[OpenCompletion]:
        """Return the open completions since `since_s` with one of these prompts, the oldest first: of the first prompt
        that has any, at most MOST_OF_PROMPT. None of them while the database cannot be reached."""
        return await self._answered(lambda: self._heads_of_prompts(prompts, since_s), [])

    async def trail(self, trajectory_id: str, since_s: float) -> TrajectoryState | None:
        """Return the state of a trajectory; it is also over if it was not seen since `since_s`. None: it does not
        exist."""
        return await self._answered(lambda: self._trail(trajectory_id, since_s), None)

    async def trains(self, trajectory_id: str) -> bool | None:
        """Return whether a trajectory is left to training; None: it does not exist. False: the database cannot be
        reached, or it is not."""
        return await self._answered(lambda: self._trains(trajectory_id), otherwise=False)

    async def unanswered(self, digest: str, turn_key: str | None, since_s: float) -> list[Repeatable]:
        """Return calls since `since_s` with this body, and this turn key if one is given, that did not get a whole
        answer."""
        return await self._answered(lambda: self._unanswered(digest, turn_key, since_s), [])

    def report_written(self, proxy_id: str, until_s: float, now_s: float) -> None:
        """Report until when this proxy's calls are written."""
        report = {"written_until": _instant(until_s), "seen_at": _instant(now_s)}
        with self._engine.begin() as connection:
            if not insert_new(connection, schema.proxies, {"project": self._project, "id": proxy_id, **report}):
                update = schema.proxies.update().where(p.project == self._project, p.id == proxy_id)
                connection.execute(update.values(**report))

    def written(self, proxy_id: str, since_s: float) -> dict[str, float]:
        """Return what the other proxies have reported since `since_s`, by id."""
        reports = self._changes.unless(("proxies", self._project), lambda: self._reports(since_s))
        return {one: until_s for one, until_s, seen_s in reports if one != proxy_id and seen_s >= since_s}

    def _reports(self, since_s: float) -> list[tuple[str, float, float]]:
        """Return the reports of all proxies since `since_s`: id, until when their calls are written, and the time of
        the report."""
        with self._reader.connect() as connection:
            rows = connection.execute(_REPORTS, {"its_project": self._project, "since": _instant(since_s)})
            return [(row.id, row.written_until.timestamp(), row.seen_at.timestamp()) for row in rows]

    def leave(self, proxy_id: str) -> None:
        """Remove this proxy, so that no other waits for it."""
        with self._engine.begin() as connection:
            connection.execute(schema.proxies.delete().where(p.project == self._project, p.id == proxy_id))

    async def _answered(self, ask: Callable[[], Result], otherwise: Otherwise) -> Result | Otherwise:
        """Run a query in a thread; return `otherwise` if it fails or takes longer than LOOK_UP_S. An app is served soon
        even without the database."""
        if time.monotonic() < self._away_until:
            return otherwise
        try:
            async with asyncio.timeout(LOOK_UP_S):
                return await asyncio.to_thread(ask)
        except (SQLAlchemyError, TimeoutError) as error:
            self._away_until = time.monotonic() + AWAY_S
            log.warning("trajectories cannot be looked up, so calls begin new ones: %s", error or type(error).__name__)
            return otherwise

    def _heads(self, histories: Sequence[bytes], tool_calls: bytes | None, since_s: float) -> list[OpenCompletion]:
        heads = self._alike(c.history, histories, since_s)
        return heads if tool_calls is None else heads + self._alike(c.tool_history, [tool_calls], since_s)

    def _alike(self, column: Any, histories: Sequence[bytes], since_s: float) -> list[OpenCompletion]:
        of_these = and_(c.project == self._project, column.in_(histories))
        query = _HEADS.where(of_these)
        is_free = and_(c.continued_by.is_(None), *_open_since(since_s, c.id))
        last_ids = select(func.max(c.id)).where(of_these).group_by(column)
        with self._reader.connect() as connection:
            free = connection.execute(query.where(is_free).order_by(_SOUGHT_ID).limit(MOST_FREE)).all()
            last = connection.execute(query.where(c.id.in_(list(connection.execute(last_ids).scalars())))).all()
            return self._opened(connection, (*free, *last), since_s)

    def _heads_of_prompts(self, prompts: Sequence[bytes], since_s: float) -> list[OpenCompletion]:
        open_since = _HEADS.where(c.project == self._project, *_open_since(since_s, _SOUGHT_ID))
        latest = open_since.order_by(_SOUGHT_ID.desc()).limit(MOST_OF_PROMPT)
        with self._reader.connect() as connection:
            for prompt in prompts:
                begins_alike = c.history.between(prompt, prompt + b"\xff" * (HISTORY_BYTES - len(prompt)))
                if rows := connection.execute(latest.where(begins_alike)).all():
                    return self._opened(connection, rows, since_s)
        return []

    def _opened(self, connection: Connection, some: Iterable[Any], since_s: float) -> list[OpenCompletion]:
        """Return these rows of _HEADS as heads, each once, the oldest first."""
        rows, since = {row.id: row for row in some}, _instant(since_s)
        pins = self._pins(connection, {row.trajectory_id for row in rows.values()})
        return [
            OpenCompletion(
                completion_id=row.id,
                trajectory_id=row.trajectory_id,
                histories=tuple(one for one in (row.history, row.tool_history) if one is not None),
                name=name_of(row.upstream_id, row.choice),
                taken_by=row.continued_by,
                over=row.state != TrajectoryStatus.OPEN or row.last_seen_at < since,
                pins=and_then(pins[row.trajectory_id], row.policy, row.policy_version, row.created_at.timestamp()),
                prompt=None if row.history is None else prompt_of(row.history),
                answer=marks_of(row.response) if row.response else "",
            )
            for _, row in sorted(rows.items())
        ]

    def _trail(self, trajectory_id: str, since_s: float) -> TrajectoryState | None:
        this = (t.project == self._project, t.id == trajectory_id)
        with self._reader.connect() as connection:
            row = connection.execute(select(t.state, t.tail_completion_id, t.last_seen_at).where(*this)).one_or_none()
            if row is None:
                return None
            over = row.state != TrajectoryStatus.OPEN or row.last_seen_at < _instant(since_s)
            after = (t.project == self._project, t.continues == row.tail_completion_id, t.id != trajectory_id)
            successors = select(t.id).join(
                schema.completions, and_(c.project == t.project, c.trajectory_id == t.id, c.turn == 0)
            )
            successor = (
                connection.execute(
                    successors.where(*after, c.threaded_by.in_(NAMED)).order_by(t.created_at).limit(1)
                ).scalar()
                if over and row.tail_completion_id is not None
                else None
            )
            pins = self._pins(connection, {trajectory_id})[trajectory_id]
        return TrajectoryState(
            row.tail_completion_id, row.last_seen_at.timestamp(), over=over, successor=successor, pins=pins
        )

    def _trains(self, trajectory_id: str) -> bool | None:
        query = select(t.split, t.no_train).where(t.project == self._project, t.id == trajectory_id)
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else row.split == "train" and not row.no_train

    def _pins(self, connection: Connection, trajectory_ids: Collection[str]) -> Mapping[str, Pins]:
        """Return the versions that answered in each of these trajectories."""
        if not trajectory_ids:
            return {}
        has_answer = or_(c.token_ids.is_not(None), response_text.is_not(None))
        of_these = (c.project == self._project, c.trajectory_id.in_(trajectory_ids), has_answer)
        version = (c.trajectory_id, c.policy, c.policy_version)
        query = select(*version, func.min(c.created_at).label("since")).where(*of_these).group_by(*version)
        pins: defaultdict[str, Pins] = defaultdict(tuple)
        for row in connection.execute(query.order_by(func.max(c.id))):
            pins[row.trajectory_id] += (Pin(row.policy, row.policy_version, row.since.timestamp()),)
        return pins

    def _unanswered(self, digest: str, turn_key: str | None, since_s: float) -> list[Repeatable]:
        query = select(c.trajectory_id, c.turn_key, c.created_at).where(
            c.project == self._project,
            c.request_digest == digest,
            c.request_digest.is_not(None),
            c.choice == 0,
            c.threaded_by.not_in(NAMED),
            c.created_at >= _instant(since_s),
        )
        if turn_key is not None:
            query = query.where(c.turn_key == turn_key)
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
        return [Repeatable(row.trajectory_id, None, row.turn_key, row.created_at.timestamp()) for row in rows]


def _open_since(since_s: float, completion_id: Any) -> tuple[Any, ...]:
    """Return the conditions of completions whose trajectory is open and was seen since then."""
    # Ids sort by time: a completion that began long before cannot be free.
    recent = completion_id >= f"{max(int(since_s * 1000), 0):012x}"
    return t.state == TrajectoryStatus.OPEN, t.last_seen_at >= _instant(since_s), recent


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
