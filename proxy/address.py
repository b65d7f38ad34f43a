"""Whose call is this: from the request's headers. Pure; knows no body and no table."""

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.errors import BadId, BadRequest
from whetstone.ids import ID

SPLITS = ("train", "eval")


class Address(msgspec.Struct, frozen=True):
    """What a call says about itself. None: not said."""

    trajectory_id: str | None = None
    group_id: str | None = None
    task: str | None = None
    split: str = "train"
    no_train: bool = False
    metadata: dict[str, Any] | None = None


def address_of(headers: Mapping[bytes, bytes]) -> Address:
    """Read `X-Trajectory-Id`, `X-Group-Id`, `X-Task`, `X-Split`, `X-No-Train` and `X-Metadata` (names in lower case).

    Raises:
        BadId: an id is not 1 to 128 of `A-Za-z0-9._:@-`.
        BadRequest: another header's value is none of those it may have.
    """
    return Address(
        trajectory_id=_id(headers, b"x-trajectory-id"),
        group_id=_id(headers, b"x-group-id"),
        task=_id(headers, b"x-task"),
        split=_one_of(headers, b"x-split", SPLITS, default="train"),
        no_train=_one_of(headers, b"x-no-train", ("true", "false"), default="false") == "true",
        metadata=_metadata(headers),
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
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"X-Metadata must be a JSON object: {error}", param="X-Metadata") from error


def _title(name: bytes) -> str:
    return name.decode().title()
