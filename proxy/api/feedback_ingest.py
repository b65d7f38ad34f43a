"""Store feedback from every route: redact it, commit or journal it, end the trajectories that it ends, look for its
target."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from proxy.domain.feedback_rows import FeedbackResult, ended_by
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.trajectories.resolver import TrajectoryResolver

LOOK_UP_S = 2.0
"""Longest wait for the database to find targets; the feedback is stored already."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedbackIngest:
    """Stores feedback rows of one project. `redactor` removes from them what must not be stored. `targets` returns the
    trajectory or group that each row is about, None where there is none."""

    recorder: Recorder
    threads: TrajectoryResolver
    redactor: Redactor | None
    targets: Callable[[Sequence[Mapping[str, Any]]], list[str | None]]

    async def __call__(self, rows: list[dict[str, Any]], key_id: str | None) -> list[FeedbackResult]:
        """Store these rows, which came with this key.

        Raises:
            NotRecorded: none of them was stored.
        """
        rows = [row | {"key_id": key_id} for row in rows]
        if self.redactor is not None:
            rows = await self.redactor.feedback(rows)
        receipts = await self.recorder.feedback(rows)
        for row in (row for row, one in zip(rows, receipts, strict=True) if one.new):
            for name in ended_by(row):
                self.threads.ended(name)
        # Calls that this proxy recorded before were written before the feedback, or with it.
        targets = await self._look_up(rows)
        for row, receipt, target in zip(rows, receipts, targets, strict=True):
            if receipt.new and row["final"] and row["target_kind"] == "completion" and target is not None:
                self.threads.ended(target)
        return [FeedbackResult(one.id, target is not None) for one, target in zip(receipts, targets, strict=True)]

    async def _look_up(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return what `targets` does; while the database cannot be reached, every target is unknown."""
        if self.recorder.away_since_s is None:
            try:
                async with asyncio.timeout(LOOK_UP_S):
                    return await asyncio.to_thread(self.targets, rows)
            except (SQLAlchemyError, TimeoutError) as error:
                log.warning("the targets of %d feedbacks are not looked up: %s", len(rows), type(error).__name__)
        return [None] * len(rows)
