"""SQL of projects and policies: what a stack needs before it starts, and what the demo shows."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Table, and_, case, func, select
from sqlalchemy.exc import SQLAlchemyError

from migrations import schema
from whetstone.config.settings import Settings, SettingsError
from whetstone.database.engine import insert_new
from whetstone.domain.ids import IMPORTED_LOG, version_id
from whetstone.errors import WhetstoneError
from whetstone.registry.version_store import set_state, tested
from whetstone.vllm.self_test.run import SelfTest


@dataclass(frozen=True)
class Rewards:
    """Reward statistics of some trajectories."""

    mean: float
    spread: float
    """Population standard deviation."""
    trajectories: int


class UnknownPolicy(WhetstoneError):
    """The project has no policy of that name; the message lists the existing policies."""


class Store:
    """Reads and writes the tables through one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")

    def prepare(self, settings: Settings) -> None:
        """Create the projects and policies of the settings, each policy with version 0, or update them.

        A new policy only records. Models of other servers are policies too; they never train.

        Raises:
            SettingsError: another project trains, or trained, a policy of that name: vLLM would mix up their adapters.
        """
        now = datetime.now(UTC)
        with self._engine.begin() as connection:
            for own in settings.of_projects():
                insert_new(connection, schema.projects, {"id": own.project, "created_at": now})
                _check_names(connection, own)
                for name in own.trained:
                    _prepare_policy(connection, own, name, f"{own.policy}@v0", None, now)
                for upstream, server in own.upstreams.items():
                    for name, model in server.models.items():
                        _prepare_policy(connection, own, name, model, upstream, now)

    def count_probe(self, settings: Settings, tokens: int) -> None:
        """Add tokens that were sampled to check that vLLM is alive; not counted while the database is unavailable."""
        v = schema.policy_versions.c
        is_base = (v.project == settings.project, v.id == settings.served_name)
        with contextlib.suppress(SQLAlchemyError), self._engine.begin() as connection:
            counted = func.coalesce(v.probe_tokens, 0) + tokens
            connection.execute(schema.policy_versions.update().where(*is_base).values(probe_tokens=counted))

    def live_name(self, settings: Settings) -> str:
        """Return vLLM's name of the policy's live version."""
        p = schema.policies.c
        query = select(p.live_version).where(p.project == settings.project, p.id == settings.policy)
        with self._reader.connect() as connection:
            return f"{settings.policy}@v{connection.execute(query).scalar_one()}"

    def served(self, project: str, policies: Sequence[str]) -> dict[str, Path]:
        """Return the adapters of these policies that vLLM must have loaded: name and folder."""
        v = schema.policy_versions.c
        of_these = (v.project == project, v.policy.in_(policies), v.served, v.adapter_path.is_not(None))
        with self._reader.connect() as connection:
            rows = connection.execute(select(v.id, v.adapter_path).where(*of_these))
            return {name: Path(folder) for name, folder in rows}

    def policies(self, project: str) -> list[dict[str, Any]]:
        """Return the project's policies."""
        return self._rows(schema.policies, schema.policies.c.project == project, schema.policies.c.id)

    def tested(self, project: str) -> dict[str, str]:
        """Return for each policy its candidate and the current test."""
        with self._reader.connect() as connection:
            return tested(connection, project)

    def set_policy_state(self, project: str, policy: str, state: str) -> None:
        """Set a policy's state: recording, training or paused.

        Raises:
            UnknownPolicy: the project has no such policy, or it belongs to another server and only records.
        """
        with self._engine.begin() as connection:
            changed = set_state(connection, project, policy, state)
        if not changed:
            names = ", ".join(row["id"] for row in self.policies(project) if row["upstream"] is None) or "none yet"
            raise UnknownPolicy(f"there is no policy {policy!r} that could train; there are: {names}")

    def keep_self_test(self, project: str, policy: str, test: SelfTest) -> bool:
        """Store the self-test of a policy's model. Return whether the policy exists."""
        p = schema.policies.c
        values = {"self_test": msgspec.to_builtins(test), "self_tested_at": test.tested_at}
        with self._engine.begin() as connection:
            changed = connection.execute(
                schema.policies.update().where(p.project == project, p.id == policy).values(values)
            )
        return changed.rowcount > 0

    def self_test(self, project: str, policy: str) -> SelfTest | None:
        """Return the last stored self-test; None without one."""
        p = schema.policies.c
        query = select(p.self_test).where(p.project == project, p.id == policy)
        with self._reader.connect() as connection:
            stored = connection.execute(query).scalar_one_or_none()
        return None if stored is None else msgspec.convert(stored, SelfTest)

    def steps(self, project: str, policy: str) -> list[dict[str, Any]]:
        """Return the policy's steps, in order."""
        s = schema.steps.c
        return self._rows(schema.steps, and_(s.project == project, s.policy == policy), s.number)

    def step_requested_at(self, project: str, policy: str, requested_at: datetime) -> dict[str, Any] | None:
        """Return the step that was requested by hand at that moment; None until it is claimed."""
        s = schema.steps.c
        of_policy = and_(s.project == project, s.policy == policy)
        steps = self._rows(schema.steps, and_(of_policy, s.asked_at == requested_at), s.number)
        return steps[0] if steps else None

    def rewards_by_version(self, project: str, policy: str) -> dict[int, Rewards]:
        """Return reward statistics of the policy's trajectories in split `train`, by the version that ended them.

        A step's own `reward_mean` covers only what it trained on, which excludes groups with equal rewards.
        """
        t = schema.trajectories.c
        # PostgreSQL raises an error when a product underflows to 0.
        near = case((func.abs(t.reward) < 1e-150, 0.0), else_=t.reward)
        query = (
            select(t.last_version, func.avg(t.reward), func.avg(near * near), func.count())
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
        """Return how many completions ended complete, aborted, or in error."""
        c = schema.completions.c
        query = select(c.status, func.count()).where(c.project == project).group_by(c.status)
        with self._reader.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def _rows(self, table: Table, where: Any, order: Any) -> list[dict[str, Any]]:
        with self._reader.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(select(table).where(where).order_by(order))]


def _check_names(connection: Connection, settings: Settings) -> None:
    p = schema.policies.c
    elsewhere = (p.project != settings.project, p.id.in_(settings.trained), p.upstream.is_(None))
    taken = connection.execute(select(p.id, p.project).where(*elsewhere)).first()
    if taken is not None:
        raise SettingsError(
            f"project {settings.project!r} cannot have the policy {taken.id!r}: it is of project {taken.project!r}; "
            "choose another name"
        )
    logs = select(p.id).where(p.project == settings.project, p.id.in_(settings.trained), p.upstream == IMPORTED_LOG)
    if (log := connection.execute(logs).scalar()) is not None:
        raise SettingsError(
            f"the policy {log!r} cannot answer: an imported log is stored under that name; choose another name for one "
            "of them (`whetstone import --policy`)"
        )


def _prepare_policy(
    connection: Connection, settings: Settings, name: str, base_model: str, upstream: str | None, now: datetime
) -> None:
    columns = {
        "base_model": base_model,
        "upstream": upstream,
        "aliases": sorted(alias for alias, policy in settings.aliases.items() if policy == name) or None,
    }
    row = {
        "project": settings.project,
        "id": name,
        "model_path": base_model if upstream else settings.model,
        "live_version": 0,
        "next_version": 1,
        "next_step": 1,
        "state": "recording",
        "created_at": now,
    }
    if not insert_new(connection, schema.policies, row | columns):
        p = schema.policies.c
        is_it = (p.project == settings.project, p.id == name)
        model_path = connection.execute(select(p.model_path).where(*is_it)).scalar_one()
        # The starter model is part of the environment, which may have been moved or recreated.
        moved = {"model_path": settings.model} if upstream is None and _is_gone(model_path) else {}
        connection.execute(schema.policies.update().where(*is_it).values(**columns, **moved))
    base = {
        "project": settings.project,
        "id": version_id(name, 0),
        "policy": name,
        "version": 0,
        "state": "live",
        "served": True,
        "created_at": now,
        "promoted_at": now,
    }
    insert_new(connection, schema.policy_versions, base)


def _is_gone(model_path: str) -> bool:
    """Return whether it is the path of a folder that does not exist. A hub name is not an absolute path."""
    return Path(model_path).is_absolute() and not Path(model_path).exists()
