"""Serve the routes under `/admin` that delete a trajectory, or everything of a user."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Response

from proxy.api.bodies import as_json
from proxy.recording.recorder import Recorder
from whetstone.privacy.eraser import Transactions, erasing
from whetstone.privacy.store import Target


def add(api: FastAPI, *, project: str, recorder: Recorder) -> None:
    """Add the routes to `api`."""

    async def erase(kind: Any, name: str) -> Response:
        row = await _run(recorder, erasing(Target(project, kind, name), datetime.now(UTC)))
        shown = {key: value for key, value in row.items() if key not in ("id", "project")}
        # Data that a running step has claimed is deleted when the step is over.
        status = 202 if row["waits_for"] else 200
        return as_json({"object": "erasure", **shown, "erasure_id": row["id"]}, status)

    @api.delete("/admin/trajectories/{trajectory_id}")
    async def delete_trajectory(trajectory_id: str) -> Response:
        """Delete a trajectory with its calls and feedback. Also report which adapters were trained on it."""
        return await erase("trajectory", trajectory_id)

    @api.delete("/admin/users/{user:path}")
    async def delete_user(user: str) -> Response:
        """Delete the trajectories in which a call was for this user. Also report which adapters were trained on
        them."""
        return await erase("user", user)


async def _run(recorder: Recorder, transactions: Transactions) -> dict[str, Any]:
    """Run each transaction in the recorder's queue, so that calls wait for one at most as long as for another call."""
    result = None
    while True:
        try:
            transaction = transactions.send(result)
        except StopIteration as end:
            row: dict[str, Any] = end.value
            return row
        # First in its transaction: it locks policies.
        result = await recorder.commit(transaction, first=True)
