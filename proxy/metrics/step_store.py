"""Run the SQL for `/metrics` about steps: the last one of each policy, and totals. Reads only.

A scrape reads only the steps that have ended since the last one: a policy's steps end in the order of their numbers and
never change afterwards. The first scrape of a process reads them all.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, Engine, select

from migrations import schema

p, s = schema.policies.c, schema.steps.c

FIGURES = (
    s.loss, s.reward_mean, s.advantage_spread, s.kl, s.entropy, s.masked_share, s.mismatch_k3, s.grad_norm,
    s.learning_rate, s.tokens_per_s, s.seconds, s.completions, s.rows, s.read_tokens,
)  # fmt: skip


@dataclass(frozen=True)
class PolicySteps:
    """A policy's steps so far."""

    policy: str
    live_version: int
    ended: Mapping[str, int]
    """State -> number of steps that ended in it."""
    sampled_tokens: int
    """Tokens trained on in all of them."""
    discarded: Mapping[str, int]
    """Reason -> groups that were discarded when they were claimed."""
    last: Mapping[str, float | None]
    """Column -> figure of the last ended step, for all of `FIGURES`; empty before the first."""
    phases: Mapping[str, float]
    """Phase -> seconds, of the last ended step."""


@dataclass
class _StepTotals:
    """One policy's totals up to and including step `number`."""

    number: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0
    discarded: Counter[str] = field(default_factory=Counter)
    last: Mapping[str, float | None] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)


class StepTables:
    """The queries of `/metrics` for one project. May be used from any thread."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._counted: dict[str, _StepTotals] = {}
        self._counting = threading.Lock()

    def read(self) -> list[PolicySteps]:
        """Return each policy that can be trained, ordered by name."""
        query = select(p.id, p.live_version).where(p.project == self._project, p.upstream.is_(None)).order_by(p.id)
        with self._counting, self._reader.connect() as connection:
            return [self._steps(connection, policy, live) for policy, live in connection.execute(query).all()]

    def _steps(self, connection: Connection, policy: str, live_version: int) -> PolicySteps:
        so_far = self._counted.setdefault(policy, _StepTotals())
        self._count(connection, policy, so_far)
        return PolicySteps(
            policy=policy,
            live_version=live_version,
            ended=dict(so_far.ended),
            sampled_tokens=so_far.sampled_tokens,
            discarded=dict(so_far.discarded),
            last=so_far.last,
            phases=so_far.phases,
        )

    def _count(self, connection: Connection, policy: str, so_far: _StepTotals) -> None:
        """Count the steps that have ended since."""
        before = so_far.number
        of_policy = (s.project == self._project, s.policy == policy)
        ended = (
            select(s.number, s.state, s.ended_at, s.sampled_tokens, s.discarded)
            .where(*of_policy, s.number > before)
            .order_by(s.number)
        )
        for row in connection.execute(ended):
            if row.ended_at is None:
                break
            so_far.number = row.number
            so_far.ended[row.state] += 1
            so_far.sampled_tokens += row.sampled_tokens or 0
            so_far.discarded.update(row.discarded or {})
        if so_far.number > before:
            last = connection.execute(select(*FIGURES, s.phases).where(*of_policy, s.number == so_far.number)).one()
            so_far.last = {column.name: last._mapping[column.name] for column in FIGURES}
            so_far.phases = last.phases or {}
