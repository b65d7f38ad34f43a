"""The proxy's SQL for shadow groups: read which ended attempts' last turns can be sampled again. Reads only."""

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, and_, or_, select

from migrations import schema
from proxy.background.shadow_groups import Attempt, Mark
from proxy.recording.turn_store import turns_to

AT_ONCE = 50

c, t, g = schema.completions.c, schema.trajectories.c, schema.groups.c


class ShadowTables:
    """The queries of `shadow_groups`, for one project."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project

    def ended(self, policies: Sequence[str], after: Mark) -> list[tuple[Mark, Attempt | None]]:
        """Return the next attempts that ended (`shadow_groups.Attempts`).

        Excludes attempts of the eval split, attempts that the app excludes from training, and shadow samples. None
        stands for an attempt in which tools were offered or used.
        """
        since, last_id = after
        columns = (t.id, t.policy, t.task, t.ended_at, t.tail_completion_id)
        last = schema.trajectories.join(schema.completions, and_(c.project == t.project, c.id == t.tail_completion_id))
        query = (
            select(*columns)
            .select_from(last)
            .where(t.project == self._project, t.ended_at >= since)
            .where(or_(t.ended_at > since, t.id > last_id))
            .where(t.policy.in_(policies), t.split == "train", t.no_train.is_(False))
            .where(c.why_not_trained.is_(None), c.threaded_by != "shadow", c.endpoint == "chat.completions")
            .order_by(t.ended_at, t.id)
            .limit(AT_ONCE)
        )
        with self._reader.connect() as connection:
            rows = connection.execute(query).all()
            return [((row.ended_at, row.id), self._attempt(connection, row)) for row in rows]

    def group_exists(self, group_id: str) -> bool:
        """Return whether this group exists (`shadow_groups.Attempts`)."""
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
        )


def _of_tools(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") in ("tool", "function") or bool(message.get("tool_calls"))
    )
