"""Read and write handovers in SQL: the rewards of a policy and of its teacher, and the decisions on the share."""

from datetime import datetime

from sqlalchemy import Engine

from trainer.domain.gate.handover import HandoverVerdict
from trainer.domain.gate.verdict import Moments
from trainer.store.rewards import read_looked, read_moments
from whetstone.registry.handover import TEST, HandoverState, decide_handover, read_handover
from whetstone.registry.versions import lock


class HandoverTables:
    """The tables, through one engine."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project

    def state(self, policy: str) -> HandoverState | None:
        """Return how far the policy's handover is; None without one."""
        with self._reader.connect() as connection:
            return read_handover(connection, self._project, policy)

    def moments(self, policy: str, state: HandoverState) -> Moments:
        """Return the moments of a policy's rewards, of any version, since the share changed, group by group."""
        with self._reader.connect() as connection:
            return read_moments(connection, self._project, policy, None, state.since)

    def looked(self, policy: str, state: HandoverState) -> int:
        """Return how many looks are over since the share changed."""
        with self._reader.connect() as connection:
            return read_looked(connection, self._project, policy, None, TEST, state.since)

    def decided(self, policy: str, state: HandoverState, verdict: HandoverVerdict, now: datetime) -> bool:
        """Record a verdict. Return whether it was: not where the share has changed since `state` was read."""
        with self._engine.begin() as connection:
            lock(connection, self._project, policy)
            now_is = read_handover(connection, self._project, policy)
            if now_is is None or (now_is.teacher, now_is.since) != (state.teacher, state.since):
                return False
            decide_handover(
                connection,
                self._project,
                policy,
                now_is,
                verdict.decision,
                verdict.share,
                verdict.reason,
                verdict.figures,
                now,
            )
            return True
