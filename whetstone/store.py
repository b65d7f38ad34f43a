"""The command line's SQL: what a stack needs before it starts, and what the demo shows."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, Table, and_, func, select
from sqlalchemy.dialects import postgresql, sqlite

from migrations import schema
from whetstone.settings import Settings

POLICY_STATES = ("recording", "training", "paused")


@dataclass(frozen=True)
class Rewards:
    """Rewards of some trajectories."""

    mean: float
    spread: float
    """Population standard deviation."""
    trajectories: int


class UnknownPolicy(Exception):
    """The project has no policy of that name; the message lists those it has."""


class Store:
    """The tables, through one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def prepare(self, settings: Settings) -> None:
        """Make sure that the project, the policy and its version 0 exist. A new policy only records."""
        now = datetime.now(UTC)
        policy = {
            "project": settings.project,
            "id": settings.policy,
            "base_model": settings.served_name,
            "model_path": settings.model,
            "live_version": 0,
            "next_version": 1,
            "next_step": 1,
            "state": "recording",
            "created_at": now,
        }
        base = {
            "project": settings.project,
            "id": settings.served_name,
            "policy": settings.policy,
            "version": 0,
            "state": "live",
            "served": True,
            "created_at": now,
            "promoted_at": now,
        }
        with self._engine.begin() as connection:
            for table, row in (
                (schema.projects, {"id": settings.project, "created_at": now}),
                (schema.policies, policy),
                (schema.policy_versions, base),
            ):
                insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
                connection.execute(insert(table).values(**row).on_conflict_do_nothing())

    def live_name(self, settings: Settings) -> str:
        """What vLLM calls the policy's live version."""
        p = schema.policies.c
        query = select(p.live_version).where(p.project == settings.project, p.id == settings.policy)
        with self._reader.connect() as connection:
            return f"{settings.policy}@v{connection.execute(query).scalar_one()}"

    def policies(self, project: str) -> list[dict[str, Any]]:
        """The project's policies."""
        return self._rows(schema.policies, schema.policies.c.project == project, schema.policies.c.id)

    def set_policy_state(self, project: str, policy: str, state: str) -> None:
        """Let a policy record, train or pause.

        Raises:
            UnknownPolicy: there is none of that name.
        """
        p = schema.policies.c
        with self._engine.begin() as connection:
            changed = connection.execute(
                schema.policies.update().where(p.project == project, p.id == policy).values(state=state)
            )
        if not changed.rowcount:
            names = ", ".join(row["id"] for row in self.policies(project)) or "none yet"
            raise UnknownPolicy(f"there is no policy {policy!r}; there are: {names}")

    def steps(self, project: str, policy: str) -> list[dict[str, Any]]:
        """The policy's steps, in order."""
        s = schema.steps.c
        return self._rows(schema.steps, and_(s.project == project, s.policy == policy), s.number)

    def rewards_by_version(self, project: str, policy: str) -> dict[int, Rewards]:
        """What the policy's trajectories in split `train` were worth, by the version that ended them.

        A step's own `reward_mean` is over what it trained on, where groups that agree are missing.
        """
        t = schema.trajectories.c
        query = (
            select(t.last_version, func.avg(t.reward), func.avg(t.reward * t.reward), func.count())
            .where(t.project == project, t.policy == policy, t.split == "train", t.reward.is_not(None))
            .group_by(t.last_version)
            .order_by(t.last_version)
        )
        with self._reader.connect() as connection:
            return {
                version: Rewards(mean, math.sqrt(max(0.0, squares - mean**2)), count)
                for version, mean, squares, count in connection.execute(query)
            }

    def completions_by_status(self, project: str) -> dict[str, int]:
        """How many completions ended complete, aborted, in error."""
        c = schema.completions.c
        query = select(c.status, func.count()).where(c.project == project).group_by(c.status)
        with self._reader.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def _rows(self, table: Table, where: Any, order: Any) -> list[dict[str, Any]]:
        with self._reader.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(select(table).where(where).order_by(order))]
