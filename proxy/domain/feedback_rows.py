"""Convert feedback to rows of table `feedback`, and read such rows. Pure."""

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from proxy.domain.answer_ids import answer_of
from proxy.domain.feedback import Feedback, check_id
from whetstone.domain.ids import new_id
from whetstone.domain.states import FeedbackState

_THUMBS = {"up": 1.0, "down": 0.0}


class FeedbackReceipt(NamedTuple):
    """An accepted row: its id, or that of the first row if a key repeats."""

    id: str
    new: bool
    """It is stored: no earlier row had its key."""


class FeedbackResult(NamedTuple):
    """What an app learns of its feedback."""

    id: str
    target_known: bool
    """Whether its target is recorded in this project by now."""


def row_of(feedback: Feedback, project: str, created_at: datetime) -> dict[str, Any]:
    """Return the row of table `feedback` that stores this feedback."""
    value, demonstration = feedback.value, feedback.demonstration
    of_completion = feedback.target == "completion_id"
    final = value is not None and not of_completion
    target_id: str = getattr(feedback, feedback.target)
    return _row(
        project,
        feedback.target.removesuffix("_id"),
        answer_of(target_id) if of_completion else target_id,
        created_at,
        choice=feedback.choice,
        reward=_THUMBS[feedback.thumbs] if feedback.thumbs else feedback.reward,
        rewards=feedback.rewards,
        parts=feedback.parts,
        judge=None if feedback.judge is None else msgspec.to_builtins(feedback.judge),
        demonstration={"role": "assistant", "content": demonstration}
        if isinstance(demonstration, str)
        else demonstration,
        source=_source(value, demonstrates=demonstration is not None),
        credit=feedback.credit,
        final=final if feedback.final is None else feedback.final,
        comment=feedback.comment,
        metadata=feedback.metadata,
        idempotency_key=feedback.idempotency_key,
    )


def _source(value: str | None, *, demonstrates: bool) -> str:
    """Return the row's `source`. `value`: the name of the field that holds the value."""
    if value is None:
        return "demonstration" if demonstrates else "comment"
    return "reward" if value == "rewards" else value


def request_row(
    source: Literal["end", "close"], target_id: str, idempotency_key: str | None, project: str, created_at: datetime
) -> dict[str, Any]:
    """Return the row that requests a trajectory's end, or a group's closing.

    Raises:
        BadRequest: an id is not 1 to 128 of `A-Za-z0-9._:@-`.
    """
    kind = {"end": "trajectory", "close": "group"}[source]
    check_id(f"{kind}_id", target_id)
    check_id("Idempotency-Key", idempotency_key)
    final = source == "end"
    return _row(project, kind, target_id, created_at, source=source, final=final, idempotency_key=idempotency_key)


def ended_by(row: Mapping[str, Any]) -> list[str]:
    """Return the trajectories that this row ends, as it names them: by their own id or by a completion's."""
    if not row["final"]:
        return []
    if row["target_kind"] == "group":
        return list(row["rewards"] or ())
    of_choice = f"/{row['choice']}" if row["choice"] else ""
    return [row["target_id"] + of_choice]


def identified(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with an id made from its idempotency key, so that a repeated post gets the same id."""
    if row["idempotency_key"] is None:
        return row
    key = f"{row['project']}\0{row['idempotency_key']}"
    return row | {"id": hashlib.sha256(key.encode()).hexdigest()[:32]}


def too_late(row: Mapping[str, Any]) -> str | None:
    """Return why the feedback in this row can no longer be withdrawn, or None if it is or will be withdrawn."""
    if row["state"] == FeedbackState.USED:
        return f"step {row['step']} has trained on it"
    if row["state"] in (FeedbackState.UNUSED, FeedbackState.FAILED):
        return f"it is {row['state']} ({row['reason']})"
    return None if row["withdrawn_at"] else "a step has claimed what it speaks of"


def _row(project: str, kind: str, target_id: str, created_at: datetime, **values: Any) -> dict[str, Any]:
    optional = (
        "reward", "rewards", "parts", "judge", "demonstration", "credit", "comment", "metadata", "idempotency_key"
    )  # fmt: skip
    return {
        "project": project,
        "id": new_id(),
        "target_kind": kind,
        "target_id": target_id,
        "choice": 0,
        "created_at": created_at,
        **dict.fromkeys(optional),
        **values,
    }
