"""Look at what runs: the processes that `up` has started, the proxy, the disk."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from whetstone.stack.admin_client import key

TIMEOUT_S = 5.0
FIGURES = {
    b"whetstone_capture_completeness": "completeness",
    b"whetstone_data_free_bytes": "free_bytes",
    b"whetstone_unwritten_calls": "unwritten",
    b"whetstone_clock_jump_seconds": "clock_jump_s",
}
"""Metrics of the proxy that are read, and their names among the facts."""


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that has ended and waits for its parent does not."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's, whose /proc is hidden
    return True


def proxy(url: str) -> dict[str, Any]:
    """Return the fields of /readyz; an admin's key gets more of them."""
    facts: dict[str, Any] = {"url": url, "answers": False, "ready": False}
    try:
        answer = httpx.get(f"{url}/readyz", headers=key(), timeout=TIMEOUT_S, trust_env=False)
        fields = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError):
        return facts
    fields.pop("status", None)
    return facts | {"answers": True, "ready": answer.status_code == 200} | fields


def figures(url: str) -> dict[str, float]:
    """Return the metrics of FIGURES that the proxy shows."""
    try:
        answer = httpx.get(f"{url}/metrics", headers=key(), timeout=TIMEOUT_S, trust_env=False)
        lines = [line.split() for line in answer.content.splitlines() if not line.startswith(b"#")]
        return {FIGURES[line[0]]: float(line[1]) for line in lines if len(line) > 1 and line[0] in FIGURES}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}


def free_bytes(data: Path) -> float | None:
    """Return the free bytes on the folder's disk; None if it cannot be looked at."""
    with suppress(OSError):
        return shutil.disk_usage(data).free
    return None
