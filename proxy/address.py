"""Whose call is this: from the request's headers. Pure; knows no body and no table."""

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.errors import BadId, BadRequest
from whetstone.ids import ID

SPLITS = ("train", "eval")
MAX_IDEMPOTENCY_KEY = 255
MAX_METADATA_PARTS = 200
"""Most lists and objects in `X-Metadata`; how deep they are nested is bounded with it."""


class Address(msgspec.Struct, frozen=True):
    """What a call says about itself. None: not said."""

    trajectory_id: str | None = None
    group_id: str | None = None
    task: str | None = None
    split: str = "train"
    no_train: bool = False
    metadata: dict[str, Any] | None = None
    turn_key: str | None = None
    """Asked again under the same one, a finished answer is given again."""
    retry: bool = False
    """The client says that it has asked before."""


def address_of(headers: Mapping[bytes, bytes]) -> Address:
    """Read what the headers (names in lower case) say of a call.

    `X-Trajectory-Id`, `X-Group-Id`, `X-Task`, `X-Split`, `X-No-Train`, `X-Metadata`; `X-Turn-Id` or, without it,
    `Idempotency-Key`; and the retry count that OpenAI's and Anthropic's clients send.

    Raises:
        BadId: an id is not 1 to 128 of `A-Za-z0-9._:@-`.
        BadRequest: another header's value is none of those it may have.
    """
    trajectory_id = _id(headers, b"x-trajectory-id")
    return Address(
        trajectory_id=trajectory_id,
        group_id=_id(headers, b"x-group-id"),
        task=_id(headers, b"x-task"),
        split=_one_of(headers, b"x-split", SPLITS, default="train"),
        no_train=_one_of(headers, b"x-no-train", ("true", "false"), default="false") == "true",
        metadata=_metadata(headers),
        turn_key=_turn_key(headers, trajectory_id),
        retry=headers.get(b"x-stainless-retry-count", b"0").strip(b"0 ").isdigit(),
    )


def _id(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    raw = headers.get(name)
    if raw is None:
        return None
    text = raw.decode("latin-1")
    if not ID.fullmatch(text):
        raise BadId(f"{_title(name)} must be 1 to 128 of A-Z a-z 0-9 . _ : @ -", param=_title(name))
    return text


def _one_of(headers: Mapping[bytes, bytes], name: bytes, values: tuple[str, ...], *, default: str) -> str:
    raw = headers.get(name)
    if raw is None:
        return default
    text = raw.decode("latin-1").strip().lower()
    if text not in values:
        raise BadRequest(f"{_title(name)} must be one of {', '.join(values)}", param=_title(name))
    return text


def _metadata(headers: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    raw = headers.get(b"x-metadata")
    if raw is None:
        return None
    if raw.count(b"[") + raw.count(b"{") > MAX_METADATA_PARTS:
        raise BadRequest(f"X-Metadata has more than {MAX_METADATA_PARTS} lists and objects", param="X-Metadata")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"X-Metadata must be a JSON object: {error}", param="X-Metadata") from error


def _turn_key(headers: Mapping[bytes, bytes], trajectory_id: str | None) -> str | None:
    """A turn's id holds within its trajectory, an idempotency key everywhere."""
    if turn_id := _id(headers, b"x-turn-id"):
        if trajectory_id is None:
            raise BadRequest(
                "X-Turn-Id holds within a trajectory: send X-Trajectory-Id too, or an Idempotency-Key",
                param="X-Turn-Id",
            )
        # No id has a slash, so no two pairs make one key.
        return f"turn:{trajectory_id}/{turn_id}"
    raw = headers.get(b"idempotency-key")
    if raw is None:
        return None
    if not 1 <= len(raw) <= MAX_IDEMPOTENCY_KEY:
        raise BadId(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY} characters", param="Idempotency-Key")
    return f"key:{raw.decode('latin-1')}"


def _title(name: bytes) -> str:
    return name.decode().title()
