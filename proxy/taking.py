"""Feedback taken in, by whichever door it comes: redacted, committed or journaled, and threads told what has ended."""

from typing import Any

from proxy.feedback_rows import ended_by
from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.threads import Threads


class Taking:
    """Takes rows of feedback of one project. `redactor`: takes out of them what is not to be written down."""

    def __init__(self, recorder: Recorder, threads: Threads, redactor: Redactor | None) -> None:
        self._recorder = recorder
        self._threads = threads
        self._redactor = redactor

    async def __call__(self, rows: list[dict[str, Any]], key_id: str | None) -> list[str]:
        """The ids of these rows, which came with that key, once they are kept.

        Raises:
            NotRecorded: nothing of them is.
        """
        rows = [row | {"key_id": key_id} for row in rows]
        if self._redactor is not None:
            rows = await self._redactor.feedback(rows)
        taken = await self._recorder.feedback(rows)
        for row in (row for row, one in zip(rows, taken, strict=True) if one.new):
            for name in ended_by(row):
                self._threads.ended(name)
        return [one.id for one in taken]
