"""Write requests as clients send them into files, without what belongs to one machine or one moment."""

import json
import re
import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from benchmarks.clients.tap import TappedCall

SESSIONS = re.compile(r"session|trajectory|user-agent|anthropic-beta|anthropic-version|originator|conversation")
"""Headers that may decide what a request means."""
_IDS = re.compile(r"(?<![0-9a-z])(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,64})(?![0-9a-z])")
_MOMENTS = (
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "2026-01-01"),
    (re.compile(r"\b\d\d:\d\d:\d\d(?:\.\d+)?\b"), "12:00:00"),
)


def write(client: str, calls: Sequence[TappedCall], private: Mapping[str, str], folder: Path) -> None:
    """Write each request of a client as `<client>_<n>.json`. `private`: texts, and what to write in their place."""
    name = client.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{name}_[0-9]*.json"):
        path.unlink()
    ids: dict[str, str] = {}
    for number, call in enumerate(_without_repeats(calls), 1):
        headers = {header: value for header, value in call.headers.items() if SESSIONS.search(header)}
        fields = clean({"path": call.path, "headers": headers, "body": json.loads(call.body)}, private, ids)
        written = json.dumps(fields, ensure_ascii=False, indent=1)
        (folder / f"{name}_{number}.json").write_text(written + "\n", encoding="utf-8")


def clean(value: Any, private: Mapping[str, str], ids: dict[str, str]) -> Any:
    """Return JSON without private texts, and with the same ids and moments in each run. `ids`: those known so far."""
    if isinstance(value, dict):
        return {name: clean(item, private, ids) for name, item in value.items()}
    if isinstance(value, list):
        return [clean(item, private, ids) for item in value]
    if not isinstance(value, str):
        return value
    for what, instead in private.items():
        value = value.replace(what, instead)
    for pattern, instead in (*_MOMENTS, (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "host")):
        value = pattern.sub(instead, value)
    return _IDS.sub(lambda match: _numbered(match[0], ids), value)


def _numbered(own: str, ids: dict[str, str]) -> str:
    """Return an id of the same form that only says how many came before it."""
    if own not in ids:
        digits = f"{len(ids) + 1:0{len(own.replace('-', ''))}x}"
        places = [0, *accumulate(len(part) for part in own.split("-"))]
        ids[own] = "-".join(digits[start:end] for start, end in pairwise(places))
    return ids[own]


def _without_repeats(calls: Sequence[TappedCall]) -> list[TappedCall]:
    """Return the calls without those that ask the same again."""
    return list({(call.path, call.body): call for call in calls}.values())


def body_of(path: Path) -> tuple[str, bytes]:
    """Return the path and the body of a written request."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields["path"], json.dumps(fields["body"]).encode()
