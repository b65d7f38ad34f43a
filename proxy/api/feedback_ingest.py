"""Store feedback from every route: redact it, commit or journal it, and end the trajectories that it ends."""

from typing import Any

from proxy.domain.feedback_rows import ended_by
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.trajectories.resolver import TrajectoryResolver


class FeedbackIngest:
    """Stores feedback rows of one project. `redactor` removes from them what must not be stored."""

    def __init__(self, recorder: Recorder, threads: TrajectoryResolver, redactor: Redactor | None) -> None:
        self._recorder = recorder
        self._threads = threads
        self._redactor = redactor

    async def __call__(self, rows: list[dict[str, Any]], key_id: str | None) -> list[str]:
        """Store these rows, which came with this key, and return their ids.

        Raises:
            NotRecorded: none of them was stored.
        """
        rows = [row | {"key_id": key_id} for row in rows]
        if self._redactor is not None:
            rows = await self._redactor.feedback(rows)
        taken = await self._recorder.feedback(rows)
        for row in (row for row, one in zip(rows, taken, strict=True) if one.new):
            for name in ended_by(row):
                self._threads.ended(name)
        return [one.id for one in taken]
