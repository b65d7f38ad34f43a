"""Store feedback from every route: redact it, commit or journal it, and end the trajectories that it ends."""

from dataclasses import dataclass
from typing import Any

from proxy.domain.feedback_rows import ended_by
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.trajectories.resolver import TrajectoryResolver


@dataclass(frozen=True, slots=True)
class FeedbackIngest:
    """Stores feedback rows of one project. `redactor` removes from them what must not be stored."""

    recorder: Recorder
    threads: TrajectoryResolver
    redactor: Redactor | None

    async def __call__(self, rows: list[dict[str, Any]], key_id: str | None) -> list[str]:
        """Store these rows, which came with this key, and return their ids.

        Raises:
            NotRecorded: none of them was stored.
        """
        rows = [row | {"key_id": key_id} for row in rows]
        if self.redactor is not None:
            rows = await self.redactor.feedback(rows)
        taken = await self.recorder.feedback(rows)
        for row in (row for row, one in zip(rows, taken, strict=True) if one.new):
            for name in ended_by(row):
                self.threads.ended(name)
        return [one.id for one in taken]
