"""A proxy in a process of its own, and what can be seen of it from outside: its state, memory, files and log.

For the harnesses. Linux, for /proc.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from whetstone.settings import Settings, as_environment

ROOT = Path(__file__).resolve().parent.parent
START_S, DRAIN_S, STOP_S = 60.0, 60.0, 40.0
"""How long it may take to be ready, to write what is recorded, and to stop."""
UNHANDLED = ("Traceback (most recent call last)", "never retrieved", "Unclosed", "never awaited")
"""Signs in the log of an exception that nobody handled."""


def unhandled(log: str) -> list[str]:
    """What the proxy's log says of exceptions that nobody handled: each kind, and its first place in full."""
    lines = log.splitlines()
    faults = []
    for sign in UNHANDLED:
        places = [place for place, line in enumerate(lines) if sign in line]
        if places:
            first = "\n  ".join(lines[max(0, places[0] - 2) : places[0] + 40])
            faults.append(f"the proxy's log has {len(places)} × {sign!r}, first\n  {first}")
    return faults


@contextmanager
def running_proxy(settings: Settings, log: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A proxy as `whetstone up` starts it: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "proxy"]
    ours = as_environment(settings, config=Path(os.devnull)) | {"WHETSTONE_PROXY__PORT": str(port)}
    environment = {**os.environ, **ours, "PYTHONASYNCIODEBUG": "", **environment}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


async def until(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Wait until it holds, at most so long; whether it does."""
    deadline = time.monotonic() + seconds
    while not (held := await holds()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return held


async def state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the proxy says of itself; nothing where it cannot be reached."""
    try:
        async with session.get(url + "/readyz") as response:
            said: dict[str, Any] = await response.json()
            return said
    except (aiohttp.ClientError, ConnectionError):
        return {}


async def ready(session: aiohttp.ClientSession, url: str, **told: int) -> bool:
    """Whether the proxy is ready to serve, and says so much of its state."""
    said = await state(session, url)
    return said.get("status") == "ok" and told.items() <= said.items()


async def no_more_files(pid: int, most: int) -> bool:
    return files_of(pid) <= most


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
