"""List the paths that the proxy serves, and parse a call's address from its headers, URL and body's metadata. Pure.

Each key is resolved on its own, and the first source that has it counts: headers, URL, body. For the trajectory's id
the session headers of agent programs come last. Without an address, `trajectories.resolver` uses the conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.errors import BadId, BadRequest
from whetstone.domain.ids import ID

RESPONSES = "/v1/responses"
RECORDED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES})
"""Paths whose calls sample, and are recorded."""
PASSED_THROUGH = frozenset(
    {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
)
"""Paths that vLLM answers without sampling: not recorded."""
HEALTH = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths about the whole proxy, of no project."""
DASHBOARD = "/ui"

SPLITS = ("train", "eval")
TRUTH = ("true", "false")
MAX_IDEMPOTENCY_KEY = 255
MAX_LABEL = 128
MAX_GROUP_SIZE = 1024
MAX_METADATA_PARTS = 200
"""Most lists and objects in `X-Metadata`. It also bounds how deep they are nested."""

KEYS = {
    "trajectory_id": "X-Trajectory-Id",
    "group_id": "X-Group-Id",
    "group_size": "X-Group-Size",
    "task": "X-Task",
    "split": "X-Split",
    "no_train": "X-No-Train",
    "turn_id": "X-Turn-Id",
}
"""Name in the body's metadata -> header."""
URL_KEYS = {name.removesuffix("_id").replace("_", "-"): name for name in KEYS}
"""Name in the URL -> name in the body's metadata."""
_HEADERS = {name: header.lower().encode() for name, header in KEYS.items()}
_RETRIES = b"x-stainless-retry-count"
_ADDRESS_HEADERS = frozenset((*_HEADERS.values(), b"x-metadata", b"idempotency-key"))

NAMED = ("header", "url", "metadata", "agent")
"""The rules by which a call itself names its trajectory (`Address.named_by`)."""

StatedValue = tuple[str, str, str]
"""The rule that gave the value, the value's name in an error message, and the value."""


class Address(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call states about itself. None: not stated."""

    trajectory_id: str | None = None
    named_by: str | None = None
    """The rule that gave the trajectory's id: header | url | metadata | agent."""
    group_id: str | None = None
    group_size: int | None = None
    """Number of trajectories that complete the group."""
    task: str | None = None
    split: str = "train"
    no_train: bool = False
    metadata: dict[str, Any] | None = None
    turn_key: str | None = None
    """A repeated request with the same key gets the finished answer again."""
    retry: bool = False
    """The client states that it has sent the request before."""

    @property
    def trains(self) -> bool:
        """Return whether it leaves the call to training."""
        return self.split == "train" and not self.no_train


def is_dashboard(path: str) -> bool:
    """Return whether a request is for the dashboard."""
    return path.startswith(DASHBOARD) and (path == DASHBOARD or path[len(DASHBOARD)] == "/")


def split_url(path: str) -> tuple[dict[str, str], str]:
    """Split `/r/trajectory/t1/group/g1/v1/…` into the values that it names and the actual path `/v1/…`.

    Raises:
        BadRequest: the path does not have this form.
    """
    parts = path.split("/")[2:]
    values: dict[str, str] = {}
    while parts and parts[0] != "v1":
        key, value, *parts = [*parts, ""] if len(parts) < 2 else parts
        if key not in URL_KEYS or not value:
            known = ", ".join(URL_KEYS)
            raise BadRequest(f"the URL must be /r/<key>/<value>/…/v1/…, its keys among {known}; not {key[:100]!r}")
        if URL_KEYS[key] in values:
            raise BadRequest(f"the URL says {key!r} twice")
        values[URL_KEYS[key]] = value
    if not parts:
        raise BadRequest("the URL has no /v1 after what it says of the call")
    return values, "/" + "/".join(parts)


def address_of(
    headers: Mapping[bytes, bytes],
    url: Mapping[str, str],
    metadata: Any,
    session_headers: Sequence[bytes] = (),
) -> Address:
    """Parse the address of a call.

    `headers` are keyed by lower-case name, `url` is what `split_url` returned, and `metadata` is the body's, as it
    came. The headers are those in KEYS, `X-Metadata`, `Idempotency-Key`, and the retry count that OpenAI's and
    Anthropic's clients send. Without `X-Metadata`, the metadata fields that are not in KEYS become the trajectory's
    metadata.

    Raises:
        BadId: an id is not 1 to 128 of `A-Za-z0-9._:@-`.
        BadRequest: another value is invalid.
    """
    own = metadata if isinstance(metadata, dict) else {}
    if not url and not own and _ADDRESS_HEADERS.isdisjoint(headers):
        # Only the headers that agent programs and clients send by themselves.
        session = None if headers.keys().isdisjoint(session_headers) else _session(headers, session_headers)
        retry = _RETRIES in headers and _retries(headers)
        return Address(session, "agent" if session else None, retry=retry) if session or retry else _NOTHING_STATED
    named = _stated("trajectory_id", headers, url, own)
    trajectory_id = _id(named) if named else _session(headers, session_headers)
    return Address(
        trajectory_id=trajectory_id,
        named_by=named[0] if named else "agent" if trajectory_id else None,
        group_id=_id(stated) if (stated := _stated("group_id", headers, url, own)) else None,
        group_size=_size(stated) if (stated := _stated("group_size", headers, url, own)) else None,
        task=_label(stated) if (stated := _stated("task", headers, url, own)) else None,
        split=_one_of(stated, SPLITS) if (stated := _stated("split", headers, url, own)) else "train",
        no_train=_one_of(stated, TRUTH) == "true" if (stated := _stated("no_train", headers, url, own)) else False,
        metadata=_metadata(headers, own),
        turn_key=_turn_key(_stated("turn_id", headers, url, own), headers, trajectory_id),
        retry=_retries(headers),
    )


_NOTHING_STATED = Address()


def _retries(headers: Mapping[bytes, bytes]) -> bool:
    count = headers.get(_RETRIES)
    return count is not None and count.strip(b"0 ").isdigit()


def _stated(
    name: str, headers: Mapping[bytes, bytes], url: Mapping[str, str], own: Mapping[str, Any]
) -> StatedValue | None:
    raw = headers.get(_HEADERS[name])
    if raw is not None:
        return "header", KEYS[name], raw.decode("latin-1")
    if name in url:
        return "url", f"the URL's {name}", url[name]
    value = own.get(name)
    if value is None:
        return None
    if isinstance(value, bool | int):
        value = str(value).lower()
    if not isinstance(value, str):
        raise BadRequest(f"metadata.{name} must be a string", param=f"metadata.{name}")
    return "metadata", f"metadata.{name}", value


def _session(headers: Mapping[bytes, bytes], session_headers: Sequence[bytes]) -> str | None:
    """Return the session that an agent program names. A value that is not a valid id is ignored."""
    for name in session_headers:
        if name in headers:
            text = headers[name].decode("latin-1").strip()
            if ID.fullmatch(text):
                return text
    return None


def _id(stated: StatedValue) -> str:
    _, name, text = stated
    if not ID.fullmatch(text):
        raise BadId(f"{name} must be 1 to 128 of A-Z a-z 0-9 . _ : @ -", param=name)
    return text


def _size(stated: StatedValue) -> int:
    _, name, text = stated
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 2 <= int(text) <= MAX_GROUP_SIZE):
        raise BadRequest(f"{name} must be a whole number from 2 to {MAX_GROUP_SIZE}", param=name)
    return int(text)


def _label(stated: StatedValue) -> str:
    _, name, text = stated
    if not (0 < len(text) <= MAX_LABEL and text.isprintable()):
        raise BadRequest(f"{name} must be 1 to {MAX_LABEL} printable characters", param=name)
    return text


def _one_of(stated: StatedValue, values: tuple[str, ...]) -> str:
    _, name, text = stated
    text = text.strip().lower()
    if text not in values:
        raise BadRequest(f"{name} must be one of {', '.join(values)}", param=name)
    return text


def _metadata(headers: Mapping[bytes, bytes], own: Mapping[str, Any]) -> dict[str, Any] | None:
    raw = headers.get(b"x-metadata")
    if raw is None:
        return {name: value for name, value in own.items() if name not in KEYS} or None
    if raw.count(b"[") + raw.count(b"{") > MAX_METADATA_PARTS:
        raise BadRequest(f"X-Metadata has more than {MAX_METADATA_PARTS} lists and objects", param="X-Metadata")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"X-Metadata must be a JSON object: {error}", param="X-Metadata") from error


def _turn_key(stated: StatedValue | None, headers: Mapping[bytes, bytes], trajectory_id: str | None) -> str | None:
    """Return the key of a repeated request. A turn's id is unique within its trajectory, an idempotency key
    everywhere."""
    if stated is not None:
        turn_id = _id(stated)
        if trajectory_id is None:
            raise BadRequest(
                f"{stated[1]} holds within a trajectory: name that too (X-Trajectory-Id), or send an Idempotency-Key",
                param=stated[1],
            )
        # An id has no slash, so no two pairs make the same key.
        return f"turn:{trajectory_id}/{turn_id}"
    raw = headers.get(b"idempotency-key")
    if raw is None:
        return None
    if not 1 <= len(raw) <= MAX_IDEMPOTENCY_KEY:
        raise BadId(f"Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY} characters", param="Idempotency-Key")
    return f"key:{raw.decode('latin-1')}"
