"""SQL of projects and policies: what a stack needs before it starts, and what the demo shows."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, Select, case, func, select
from sqlalchemy.exc import SQLAlchemyError

from migrations import schema
from whetstone.config.settings import Settings, SettingsError
from whetstone.database.engine import insert_new
from whetstone.domain.ids import IMPORTED_LOG, version_id
from whetstone.errors import WhetstoneError
from whetstone.registry.handover import prepare_handover
from whetstone.registry.version_store import set_state
from whetstone.vllm.self_test.run import SelfTest

c, p, s, t, v = (
    schema.completions.c,
    schema.policies.c,
    schema.steps.c,
    schema.trajectories.c,
    schema.policy_versions.c,
)


TRAINED = "trained"


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
                    prepare_handover(connection, own.project, name, own.learning_of(name).handover, now)
                for upstream, server in own.upstreams.items():
                    for name, model in server.models.items():
                        _prepare_policy(connection, own, name, model, upstream, now)

    def count_probe(self, settings: Settings, tokens: int) -> None:
        """Add tokens that were sampled to check that vLLM is alive; not counted while the database is unavailable."""
        base = schema.policy_versions.update().where(v.project == settings.project, v.id == settings.served_name)
        with contextlib.suppress(SQLAlchemyError), self._engine.begin() as connection:
            connection.execute(base.values(probe_tokens=func.coalesce(v.probe_tokens, 0) + tokens))

    def live_name(self, settings: Settings) -> str:
        """Return vLLM's name of the policy's live version."""
        (row,) = self._read(select(p.live_version).where(p.project == settings.project, p.id == settings.policy))
        return version_id(settings.policy, row.live_version)

    def served(self, project: str, policies: Sequence[str]) -> dict[str, Path]:
        """Return the adapters of these policies that vLLM must have loaded: name and folder."""
        of_these = (v.project == project, v.policy.in_(policies), v.served, v.adapter_path.is_not(None))
        return {row.id: Path(row.adapter_path) for row in self._read(select(v.id, v.adapter_path).where(*of_these))}

    def policies(self, project: str) -> list[dict[str, Any]]:
        """Return the project's policies."""
        return self._dicts(select(schema.policies).where(p.project == project).order_by(p.id))

    def tested(self, project: str) -> dict[str, str]:
        """Return for each policy its candidate and the current test, as shown: `5 (canary)`."""
        rows = self._read(
            select(v.policy, v.version, v.tested_by)
            .where(v.project == project, v.state == "candidate")
            .order_by(v.version)
        )
        return {row.policy: f"{row.version} ({row.tested_by or 'probe'})" for row in rows}

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
        update = (
            schema.policies.update()
            .where(p.project == project, p.id == policy)
            .values(self_test=msgspec.to_builtins(test), self_tested_at=test.tested_at)
        )
        with self._engine.begin() as connection:
            return connection.execute(update).rowcount > 0

    def self_test(self, project: str, policy: str) -> SelfTest | None:
        """Return the last stored self-test; None without one."""
        stored = self._read(select(p.self_test).where(p.project == project, p.id == policy, p.self_test.is_not(None)))
        return msgspec.convert(stored[0].self_test, SelfTest) if stored else None

    def steps(self, project: str, policy: str) -> list[dict[str, Any]]:
        """Return the policy's steps, in order."""
        return self._dicts(select(schema.steps).where(s.project == project, s.policy == policy).order_by(s.number))

    def step_requested_at(self, project: str, policy: str, requested_at: datetime) -> dict[str, Any] | None:
        """Return the step that was requested by hand at that moment; None until it is claimed."""
        is_it = (s.project == project, s.policy == policy, s.asked_at == requested_at)
        steps = self._dicts(select(schema.steps).where(*is_it).order_by(s.number).limit(1))
        return steps[0] if steps else None

    def rewards_by_version(self, project: str, policy: str) -> dict[int, Rewards]:
        """Return reward statistics of the policy's trajectories in split `train`, by the version that ended them.

        A step's own `reward_mean` covers only what it trained on, which excludes groups with equal rewards.
        """
        # PostgreSQL raises an error when a product underflows to 0.
        near = case((func.abs(t.reward) < 1e-150, 0.0), else_=t.reward)
        query = (
            select(t.last_version, func.avg(t.reward).label("mean"), func.avg(near * near).label("squares"))
            .add_columns(func.count().label("trajectories"))
            .where(t.project == project, t.policy == policy, t.split == "train", t.reward.is_not(None))
            .group_by(t.last_version)
            .order_by(t.last_version)
        )
        return {
            row.last_version: Rewards(row.mean, math.sqrt(max(0.0, row.squares - row.mean**2)), row.trajectories)
            for row in self._read(query)
        }

    def training_fates(self, project: str, policy: str) -> dict[str, int]:
        """Return how many trajectories in split `train` were trained on (TRAINED), and how many were not, by reason."""
        rows = self._read(
            select(t.why_not_trained, func.count())
            .where(t.project == project, t.policy == policy, t.split == "train")
            .group_by(t.why_not_trained)
        )
        counts: dict[str | None, int] = dict(map(tuple, rows))
        return {reason or TRAINED: count for reason, count in counts.items()}

    def completions_by_status(self, project: str) -> dict[str, int]:
        """Return how many completions ended complete, aborted, or in error."""
        counted = self._read(select(c.status, func.count()).where(c.project == project).group_by(c.status))
        return dict(map(tuple, counted))

    def _read(self, query: Select[Any]) -> Sequence[Row[Any]]:
        with self._reader.connect() as connection:
            return connection.execute(query).all()

    def _dicts(self, query: Select[Any]) -> list[dict[str, Any]]:
        return [dict(row._mapping) for row in self._read(query)]


def _check_names(connection: Connection, settings: Settings) -> None:
    elsewhere = (p.project != settings.project, p.id.in_(settings.trained), p.upstream.is_(None))
    if (taken := connection.execute(select(p.id, p.project).where(*elsewhere)).first()) is not None:
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
    columns: dict[str, Any] = {
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
        is_it = (p.project == settings.project, p.id == name)
        model_path = connection.execute(select(p.model_path).where(*is_it)).scalar_one()
        # The starter model is part of the environment, which may have been moved or recreated. A hub name is not an
        # absolute path.
        if upstream is None and Path(model_path).is_absolute() and not Path(model_path).exists():
            columns["model_path"] = settings.model
        connection.execute(schema.policies.update().where(*is_it).values(columns))
    insert_new(
        connection,
        schema.policy_versions,
        {
            "project": settings.project,
            "id": version_id(name, 0),
            "policy": name,
            "version": 0,
            "state": "live",
            "served": True,
            "created_at": now,
            "promoted_at": now,
        },
    )
