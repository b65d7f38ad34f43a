"""Routes under `/admin` that delete: a trajectory, or all that a user said. Knows answers; what goes is the stores'."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Response

from proxy.recorder import Recorder
from proxy.responses import as_json
from whetstone.privacy_erasing import Transactions, erasing
from whetstone.store_privacy import Target


def add(api: FastAPI, *, project: str, recorder: Recorder) -> None:
    """Add the routes to `api`."""

    async def erase(kind: Any, name: str) -> Response:
        row = await _run(recorder, erasing(Target(project, kind, name), datetime.now(UTC)))
        row["erasure_id"] = row.pop("id")
        del row["project"]
        # What a step has taken goes when that is over.
        return as_json({"object": "erasure"} | row, status=202 if row["waits_for"] else 200)

    @api.delete("/admin/trajectories/{trajectory_id}")
    async def delete_trajectory(trajectory_id: str) -> Response:
        """Delete a trajectory with all that was said in it and of it; which adapters have learned from it."""
        return await erase("trajectory", trajectory_id)

    @api.delete("/admin/users/{user:path}")
    async def delete_user(user: str) -> Response:
        """Delete the trajectories in which a call was for this user; which adapters have learned from them."""
        return await erase("user", user)


async def _run(recorder: Recorder, transactions: Transactions) -> dict[str, Any]:
    """Each in its turn among what is written, so that calls wait for none of them longer than for another call."""
    result = None
    while True:
        try:
            transaction = transactions.send(result)
        except StopIteration as end:
            row: dict[str, Any] = end.value
            return row
        # First: it locks policies.
        result = await recorder.commit(transaction, first=True)
