"""Run a proxy in its own process, and observe it from outside: its state, memory, files and log. Linux, for /proc."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx

from benchmarks.kit.redis_server import Redis
from migrations.run import upgrade
from whetstone.config.settings import Settings, as_environment
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.stack.stack import free_ports
from whetstone.stack.supervisor import Part, Supervisor
from whetstone.vllm import client

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from whetstone.cli.main import main; main()"
"""The command line, for `python -c`: its script may be of another checkout."""
START_S, DRAIN_S, QUIET_S, STOP_S = 60.0, 60.0, 30.0, 40.0
"""Time limits: to be ready, to write what is recorded, to close unused connections, and to stop."""
UNHANDLED = ("Traceback (most recent call last)", "never retrieved", "Unclosed", "never awaited")
"""Signs of an unhandled exception in the log."""
CONTROL_CONNECTIONS = 2
"""Connections to each model server, at once, for the proxy's own calls: health, and loading adapters."""
POOLED = 17
"""Most connections to the database: the pool's, the writer's, and one that checks whether anything was written."""
LISTENING = "0A"
"""The kernel's code of that state, in /proc/net/tcp."""
WHEN_QUIET = {
    "clients": 0,
    "model servers": CONTROL_CONNECTIONS,
    "journal": 4,
    "database": POOLED,
    "database's log": POOLED,
    "database's index": 1,
}
"""Most descriptors by kind when there are no requests and SQL has everything. SQLite opens a database and its log for
each connection, and the log's index once. Of the journal's two segments that take turns, the memory that is mapped to
each has a descriptor of its own.
"""


def unhandled(log: str) -> list[str]:
    """Return the unhandled exceptions in the proxy's log: each kind, and its first place in full."""
    lines = log.splitlines()
    faults = []
    for sign in UNHANDLED:
        if places := [place for place, line in enumerate(lines) if sign in line]:
            first = "\n  ".join(lines[max(0, places[0] - 2) : places[0] + 40])
            faults.append(f"the proxy's log has {len(places)} × {sign!r}, first\n  {first}")
    return faults


def prepare(settings: Settings) -> None:
    """Create its tables and its projects, as `whetstone up` does."""
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    Store(engine).prepare(settings)
    engine.dispose()


@contextmanager
def running_proxy(
    settings: Settings, log: Path, under: Sequence[str] = (), **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a proxy as `whetstone up` does; yield its address and its process. `under`: a command that runs it."""
    (port,) = free_ports(1)
    command = [*under, sys.executable, "-m", "proxy"]
    ours = as_environment(settings, config=Path(os.devnull)) | {"WHETSTONE_PROXY__PORT": str(port)}
    environment = {**os.environ, **ours, "PYTHONASYNCIODEBUG": "", **environment}
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()


@contextmanager
def running_broker() -> Iterator[str]:
    """Start a Redis of our own without persistence, as `whetstone up` does; yield its address."""
    with closing(Redis()) as redis:
        yield redis.url


@contextmanager
def running_adapter_vllm(settings: Settings) -> Iterator[str]:
    """Run `benchmarks.fakes.adapter_vllm` in a process of its own, which is never killed; yield its address."""
    command = [sys.executable, "-m", "benchmarks.fakes.adapter_vllm"]
    environment = {**os.environ, **as_environment(settings)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def running_vllms(folder: Path, servers: Mapping[str, Settings]) -> Iterator[tuple[str, ...]]:
    """Run real vLLM servers, which are never restarted, with these settings by name; yield their addresses.

    Raises:
        StartFailed: one does not start; its log is in `folder`.
    """
    supervisor, urls = Supervisor(folder), []
    try:
        for name, settings in servers.items():
            (port,) = free_ports(1)
            urls.append(f"http://127.0.0.1:{port}")
            command, healthy = client.command(settings, port), client.Vllm(urls[-1]).healthy
            timeout_s = settings.vllm.start_timeout_s
            supervisor.start(Part(name, command, client.environment(settings), healthy, timeout_s))
        supervisor.await_ready(*servers)
        yield tuple(urls)
    finally:
        supervisor.stop()


def add_vllm_argument(parser: argparse.ArgumentParser) -> None:
    """Let a check use a vLLM that runs already; see `borrowed_vllm`."""
    parser.add_argument("--vllm", metavar="URL", help="a running vLLM with the starter model, not one of its own")


@contextmanager
def borrowed_vllm(url: str | None) -> Iterator[dict[str, Any]]:
    """Yield the settings that name a running vLLM, none without `url`. At the end, unload what the run loaded.

    vLLM must run with VLLM_SERVER_DEV_MODE=1: its cache of prefixes tells adapters apart by their names, and another
    run may have loaded others under the same ones, so it is emptied before and after.

    Raises:
        VllmDown: it cannot be reached.
        HTTPStatusError: it does not run in that mode.
    """
    if url is None:
        yield {}
        return
    with closing(client.Vllm(url)) as control:
        before = control.models()
        try:
            _empty_prefix_cache(url)
            yield {"vllm__urls": (url,)}
        finally:
            for name in control.models() - before:
                control.unload(name)
            _empty_prefix_cache(url)


def _empty_prefix_cache(url: str) -> None:
    httpx.post(f"{url}/reset_prefix_cache", timeout=client.CONTROL_TIMEOUT_S, trust_env=False).raise_for_status()


def answers(url: str) -> bool:
    """Return whether a server answers a GET with success, within two seconds."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def await_true(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not, in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:g} s: {what} does not hold")
        time.sleep(0.1)


async def until(holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Wait until it holds, at most `seconds`; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (result := await holds()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return result


async def state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the proxy's own report of its state; empty where it cannot be reached."""
    try:
        async with session.get(url + "/readyz") as response:
            return await response.json()  # type: ignore[no-any-return]
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return {}


async def ready(session: aiohttp.ClientSession, url: str, **values: int) -> bool:
    """Return whether the proxy is ready to serve and its state has these values."""
    reported = await state(session, url)
    return reported.get("status") == "ok" and values.items() <= reported.items()


def open_files(pid: int, url: str, model_servers: Collection[str]) -> Counter[str]:
    """Return what a process has open, by the kinds of WHEN_QUIET; everything else is `rest`.

    A connection whose other end is gone still counts; one that has no state any more is in `rest`.
    """
    here, there = urlsplit(url).port, {urlsplit(one).port for one in model_servers}
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(descriptor.readlink()))
    connections = _connections(pid)
    counts: Counter[str] = Counter()
    for link in links:
        local, remote, state_of = connections.get(link, (None, None, ""))
        is_client = local == here and state_of != LISTENING
        kind = "clients" if is_client else "model servers" if remote in there else _kind_of(link)
        counts[kind] += 1
    return counts


def too_many(counts: Mapping[str, int], most: Mapping[str, int]) -> list[str]:
    """Return the kinds with more open descriptors than allowed."""
    return [
        f"open files, {kind}: {count}, {most.get(kind, 0)} may be"
        for kind, count in counts.items()
        if count > most.get(kind, 0)
    ]


async def left_open(
    pid: int, url: str, model_servers: Collection[str], before: Mapping[str, int]
) -> tuple[Counter[str], list[str]]:
    """Return what is open after the last request, and the faults: what should be closed.

    Persistent connections end by themselves within seconds; `rest` must be as it was `before`.
    """
    most, files = WHEN_QUIET | {"rest": before["rest"]}, Counter[str]()

    async def quiet() -> bool:
        nonlocal files
        files = open_files(pid, url, model_servers)
        return not too_many(files, most)

    await until(quiet, QUIET_S)
    return files, too_many(files, most)


def _kind_of(link: str) -> str:
    path = link.removesuffix(" (deleted)")
    ends = {
        ".journal": "journal", "/journal": "journal", ".db": "database", ".db-wal": "database's log",
        ".db-shm": "database's index",
    }  # fmt: skip
    return next((kind for end, kind in ends.items() if path.endswith(end)), "rest")


def _connections(pid: int) -> dict[str, tuple[int, int, str]]:
    """Return TCP connections: link of the descriptor -> own port, the other end's port, state."""
    fields = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{one[9]}]": (_port(one[1]), _port(one[2]), one[3]) for one in fields}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
