"""The proxy's SQL for what it samples itself: held-out answers that are due, and attempts that may get siblings."""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, and_, or_, select

from migrations import schema
from proxy.recording.turn_store import turns_to
from whetstone.database.change_detector import Changes
from whetstone.domain.why_not_trained import WhyNotTrained

AT_ONCE = 50
"""Most attempts that are read at once."""
SOME = 64
"""Most due answers that are read at once."""

e, c, t, g = schema.evaluations.c, schema.completions.c, schema.trajectories.c, schema.groups.c

Mark = tuple[datetime, str]
"""When a trajectory ended, and its id: how far the search has come."""


class Attempt(msgspec.Struct, frozen=True):
    """An ended trajectory whose last turn may get siblings."""

    trajectory_id: str
    policy: str
    task: str | None
    messages: list[msgspec.Raw]
    """The conversation before its last answer."""
    prompt_token_ids: list[int]
    sampling: Mapping[str, Any]
    explored: float | None
    """The temperature that it was sampled at, where its app set 0; None: it was not explored."""


class DueAnswer(msgspec.Struct, frozen=True):
    """An answer to be sampled, and what its prompt was sent with."""

    trajectory_id: str
    group_id: str
    policy: str
    version: int
    task: str | None
    metadata: dict[str, Any] | None
    end_user: str | None
    messages: list[Any]
    tools: list[Any] | None
    sampling: dict[str, Any]


class BackgroundTables:
    """The queries of `evaluations` and `shadow_groups`, for one project."""

    def __init__(self, engine: Engine, project: str, changes: Changes) -> None:
        self._engine = engine
        self._changes = changes
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._due = and_(e.project == project, e.drawn_at.is_(None), e.error.is_(None))

    def due(self) -> list[DueAnswer]:
        """Return some due answers."""
        return self._changes.unless(("due", self._project), self._some_due)

    def _some_due(self) -> list[DueAnswer]:
        source = and_(c.project == e.project, c.id == e.source_id)
        trajectory = and_(t.project == c.project, t.id == c.trajectory_id)
        columns = (e.trajectory_id, e.group_id, e.policy, e.version, t.task, t.metadata, t.end_user)
        query = (
            select(*columns, c.new_messages, c.tools, c.sampling)
            .select_from(schema.evaluations.join(schema.completions, source).join(schema.trajectories, trajectory))
            .where(self._due)
            .limit(SOME)
        )
        with self._reader.connect() as connection:
            return [
                DueAnswer(*row[:7], messages=row.new_messages, tools=row.tools, sampling=row.sampling or {})
                for row in connection.execute(query)
            ]

    def is_due(self, trajectory_id: str) -> bool:
        """Return whether the answer is still due: not sampled meanwhile, and its test not ended."""
        with self._reader.connect() as connection:
            query = select(e.trajectory_id).where(self._due, e.trajectory_id == trajectory_id)
            return connection.execute(query).first() is not None

    def over(self, trajectory_id: str, error: str | None = None) -> None:
        """Record that the answer was sampled, or the error that prevents it."""
        values = {"drawn_at": datetime.now(UTC)} if error is None else {"error": error}
        with self._engine.begin() as connection:
            connection.execute(
                schema.evaluations.update().where(self._due, e.trajectory_id == trajectory_id).values(values)
            )

    def ended(
        self, policies: Sequence[str], exploring: Collection[str], after: Mark
    ) -> list[tuple[Mark, Attempt | None]]:
        """Return the next attempts that ended, the earliest first.

        Excludes attempts of the eval split, attempts that the app excludes from training, and shadow samples; attempts
        at temperature 0 unless their policy is in `exploring`; and attempts that a grammar or a truncation constrained,
        as siblings are not. None stands for an attempt in which tools were offered or used.
        """
        since, last_id = after
        last = schema.trajectories.join(schema.completions, and_(c.project == t.project, c.id == t.tail_completion_id))
        trains = and_(c.why_not_trained.is_(None), c.constraints.is_(None))
        greedy = and_(c.why_not_trained == WhyNotTrained.GREEDY.value, t.policy.in_(exploring))
        query = (
            select(t.id, t.policy, t.task, t.ended_at, t.tail_completion_id)
            .select_from(last)
            .where(t.project == self._project, t.ended_at >= since)
            .where(or_(t.ended_at > since, t.id > last_id))
            .where(t.policy.in_(policies), t.split == "train", t.no_train.is_(False))
            .where(or_(trains, greedy), c.prompt_token_ids.is_not(None))
            .where(c.threaded_by != "shadow", c.endpoint == "chat.completions")
            .order_by(t.ended_at, t.id)
            .limit(AT_ONCE)
        )
        with self._reader.connect() as connection:
            return [((row.ended_at, row.id), self._attempt(connection, row)) for row in connection.execute(query).all()]

    def group_exists(self, group_id: str) -> bool:
        """Return whether this group exists."""
        with self._reader.connect() as connection:
            query = select(g.id).where(g.project == self._project, g.id == group_id)
            return connection.execute(query).first() is not None

    def _attempt(self, connection: Connection, row: Any) -> Attempt | None:
        """Return the attempt with its last turn's whole conversation and prompt, read back along `follows`."""
        turns = turns_to(connection, self._project, row.tail_completion_id)
        messages: list[Any] = []
        token_ids: list[int] = []
        for turn in turns[:-1]:
            messages += [*(turn.new_messages or ()), turn.response]
            token_ids += turn.prompt_token_ids + turn.token_ids
        messages += turns[-1].new_messages or ()
        if any(turn.tools is not None for turn in turns) or any(_of_tools(message) for message in messages):
            return None
        return Attempt(
            trajectory_id=row.id,
            policy=row.policy,
            task=row.task,
            messages=[msgspec.Raw(msgspec.json.encode(message)) for message in messages],
            prompt_token_ids=token_ids + turns[-1].prompt_token_ids,
            sampling=turns[-1].sampling or {},
            explored=turns[-1].explored,
        )


def _of_tools(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") in ("tool", "function") or bool(message.get("tool_calls"))
    )
