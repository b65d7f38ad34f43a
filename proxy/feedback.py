"""What an app says a trajectory was worth: the body of `POST /v1/feedback` into rows. Pure; knows no table's state."""

import contextlib
import difflib
import json
import math
from datetime import datetime
from typing import Any, Literal

import msgspec

from proxy.errors import BadRequest, NotJson
from whetstone.ids import ID, new_id

MAX_BATCH = 1000
MAX_COMMENT = 20_000
MAX_REWARD = 1e9
"""Largest size of a reward. What is squared and summed on the way must stay finite in float32."""
NOT_YET = frozenset({"judge", "parts", "demonstration"})
"""Fields of the contract that this version does not serve: refused, never ignored."""

_THUMBS = {"up": 1.0, "down": 0.0}
_TARGETS = ("trajectory_id", "completion_id", "group_id")
_VALUES = ("reward", "rewards", "thumbs")


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feedback as an app posts it: one target, one value."""

    trajectory_id: str | None = None
    completion_id: str | None = None
    group_id: str | None = None
    choice: int = 0
    reward: float | None = None
    rewards: dict[str, float] | None = None
    thumbs: Literal["up", "down"] | None = None
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    final: bool | None = None


def read_feedback(body: bytes) -> tuple[list[Feedback], bool]:
    """Read one feedback or a JSON array of them; whether it was an array.

    Raises:
        NotJson: the body is no JSON, or a number in it is none (NaN, Infinity).
        BadRequest: a field is unknown, of the wrong type, or contradicts another; nothing of a batch is taken then.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(_why_not_json(body, error)) from error
    items = raw if isinstance(raw, list) else [raw]
    if not 1 <= len(items) <= MAX_BATCH:
        raise BadRequest(f"a batch holds 1 to {MAX_BATCH} feedbacks, not {len(items)}")
    return [_read_one(item) for item in items], isinstance(raw, list)


def row_of(feedback: Feedback, project: str, created_at: datetime) -> dict[str, Any]:
    """The row of table `feedback` that stores it."""
    target = next(name for name in _TARGETS if getattr(feedback, name) is not None)
    final = feedback.final if feedback.final is not None else target != "completion_id"
    return {
        "project": project,
        "id": new_id(),
        "target_kind": target.removesuffix("_id"),
        "target_id": getattr(feedback, target),
        "choice": feedback.choice,
        "reward": feedback.reward if feedback.thumbs is None else _THUMBS[feedback.thumbs],
        "rewards": feedback.rewards,
        "source": "reward" if feedback.thumbs is None else "thumbs",
        "final": final,
        "comment": feedback.comment,
        "metadata": feedback.metadata,
        "idempotency_key": feedback.idempotency_key,
        "created_at": created_at,
    }


def _read_one(item: Any) -> Feedback:
    if isinstance(item, dict):
        _refuse_unknown(item)
    try:
        feedback = msgspec.convert(item, Feedback)
    except msgspec.ValidationError as error:
        raise BadRequest(f"feedback: {error}") from error
    _check_target(feedback)
    _check_value(feedback)
    if feedback.comment is not None and len(feedback.comment) > MAX_COMMENT:
        raise BadRequest(f"comment is over {MAX_COMMENT} characters", param="comment")
    if feedback.idempotency_key is not None and not ID.fullmatch(feedback.idempotency_key):
        raise BadRequest("idempotency_key must be 1 to 128 of A-Z a-z 0-9 . _ : @ -", param="idempotency_key")
    return feedback


def _refuse_unknown(item: dict[str, Any]) -> None:
    for field in item:
        if field in NOT_YET:
            raise BadRequest(f"{field!r} is not served by this version; post reward, rewards or thumbs", param=field)
        if field not in Feedback.__struct_fields__:
            nearest = difflib.get_close_matches(field[:100], Feedback.__struct_fields__, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise BadRequest(f"feedback has no field {field[:100]!r}{hint}", param=field[:100])


def _check_target(feedback: Feedback) -> None:
    given = [name for name in _TARGETS if getattr(feedback, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"feedback needs exactly one of {', '.join(_TARGETS)}; got {', '.join(given) or 'none'}")
    if not ID.fullmatch(getattr(feedback, given[0])):
        raise BadRequest(f"{given[0]} must be 1 to 128 of A-Z a-z 0-9 . _ : @ -", param=given[0])
    if not 0 <= feedback.choice < 2**31:
        raise BadRequest("choice counts from 0", param="choice")


def _check_value(feedback: Feedback) -> None:
    given = [name for name in _VALUES if getattr(feedback, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"feedback needs exactly one of {', '.join(_VALUES)}; got {', '.join(given) or 'none'}")
    if feedback.rewards == {}:
        raise BadRequest("rewards names no trajectory", param="rewards")
    if (feedback.group_id is not None) != (feedback.rewards is not None):
        raise BadRequest("a group takes `rewards` ({trajectory_id: number}), nothing else does", param=given[0])
    for trajectory_id, reward in (feedback.rewards or {"": feedback.reward or 0.0}).items():
        if not math.isfinite(reward):
            raise BadRequest(f"reward must be a finite number, not {reward}", param=given[0])
        if abs(reward) > MAX_REWARD:
            raise BadRequest(f"reward must lie within ±{MAX_REWARD:g}, not at {reward}", param=given[0])
        if feedback.rewards is not None and not ID.fullmatch(trajectory_id):
            raise BadRequest(f"rewards: {trajectory_id[:200]!r} is no trajectory id", param="rewards")


def _why_not_json(body: bytes, error: Exception) -> str:
    constants: list[str] = []
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body, parse_constant=constants.append)
    if constants:
        return f"{constants[0]} is not a number JSON has; a reward must be finite"
    return f"the body must be JSON: {error}"
