"""The stacks of `swaps`: start them as `whetstone up` does, watch them, and read the state of ledger and servers."""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from sqlalchemy import select

from benchmarks.kit import proc, process
from benchmarks.swaps.adapters import Sets
from benchmarks.swaps.figures import Swap
from migrations import schema
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.registry import versions
from whetstone.registry.projects import Store
from whetstone.stack.stack import Stack, running
from whetstone.stack.supervisor import StartFailed
from whetstone.vllm import client

DRAIN_S = 2.0
"""Setting `proxy.drain_s` of the runs: old versions must go while the next versions come."""
MAX_WAIT_S = 240.0
"""Setting `proxy.max_wait_s` of the runs: longer than a start of vLLM on a busy machine."""
SETTLE_S, ADMIN_S = 60.0, 90.0
KNOWN_AFTER = 10
"""After this many times `proxy.refresh_s` every proxy uses what was committed, even on a busy machine."""
SAMPLED = re.compile(r"^vllm:generation_tokens_total\b.* (\S+)$", re.MULTILINE)
NONE: Mapping[str, str] = {}


def settings_of(data: Path, seed: int, **given: Any) -> Settings:
    """Return the defaults, except for what the run needs to see soon."""
    given |= {"proxy__drain_s": DRAIN_S, "proxy__max_wait_s": MAX_WAIT_S}
    return load(environment={}, data=data, seed=seed, proxy__port=0, **given)


class Scene:
    """A running stack, its ledger, and the two sets of weights."""

    def __init__(self, stack: Stack, sets: Sets) -> None:
        self.settings = stack.settings
        self.url = stack.proxy_url
        self.sets = sets
        self.engine = connect(stack.settings.database_url)
        self.reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.controls = {url: client.Vllm(url) for url in stack.settings.vllm.urls}

    def close(self) -> None:
        """Close the connections to the database and the servers."""
        self.engine.dispose()
        for control in self.controls.values():
            control.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by part, from up.json."""
        return dict(json.loads((self.settings.data / "up.json").read_text())["pids"])

    def live(self) -> int:
        """Return the live version."""
        p = schema.policies.c
        query = select(p.live_version).where(p.project == self.settings.project, p.id == self.settings.policy)
        with self.reader.connect() as connection:
            return int(connection.execute(query).scalar_one())

    def lacking(self, refused: Mapping[str, str] = NONE) -> list[str]:
        """Return how the servers differ from the ledger, including adapters that are no longer needed.

        `refused`: server -> the adapter that it does not accept.
        """
        adapters, differences = Store(self.engine).served(self.settings.project, self.settings.trained), []
        for url, control in self.controls.items():
            due = {self.settings.served_name, *adapters} - {refused.get(url)}
            try:
                names = control.models()
                if names != due:
                    differences.append(f"{url} has {', '.join(sorted(names))}, not {', '.join(sorted(due))}")
            except client.VllmError as error:
                differences.append(str(error))
        return differences

    def most_loaded(self) -> int:
        """Return the largest number of models that a server lists."""
        return max(len(control.models()) for control in self.controls.values())

    def replicas(self) -> dict[str, str]:
        """Return each server's state, as recorded by the proxy."""
        r = schema.replicas.c
        with self.reader.connect() as connection:
            return {row.id: row.state for row in connection.execute(select(r.id, r.state).order_by(r.id))}

    def promote(self, version: int) -> tuple[Swap, httpx.Response]:
        """Write a version and promote it; return when that began and ended, and the answer."""
        load_at = time.monotonic()
        self.sets.add_version(self.engine, version, parent=self.live())
        url = f"{self.url}/admin/policies/{self.settings.policy}/promote"
        answer = httpx.post(url, json={"version": version}, timeout=ADMIN_S, trust_env=False)
        return Swap(version, load_at, time.monotonic()), answer

    def make_live(self, version: int) -> Swap:
        """Make it live in any state of the servers, as when one of them lost it a moment later."""
        load_at, settings = time.monotonic(), self.settings
        with self.engine.begin() as connection:
            versions.lock(connection, settings.project, settings.policy)
            keep_served, now = settings.trainer.keep_served, datetime.now(UTC)
            versions.make_live(connection, settings.project, settings.policy, version, keep_served, now)
        # A proxy that did not do it itself notices when it reads the policies next.
        return Swap(version, load_at, time.monotonic() + KNOWN_AFTER * settings.proxy.refresh_s)

    def sampled(self, url: str) -> float:
        """Return how many tokens a server has sampled since its start."""
        metrics = httpx.get(url + "/metrics", timeout=10, trust_env=False).text
        return sum(float(count) for count in SAMPLED.findall(metrics))

    async def written(self) -> None:
        """Wait until SQL has every record.

        Raises:
            TimeoutError: it has not in time.
        """

        def is_written() -> bool:
            with contextlib.suppress(httpx.TransportError):
                state = httpx.get(self.url + "/readyz", timeout=10, trust_env=False).json()
                return bool(state.get("unwritten") == 0)
            return False

        await until(is_written, SETTLE_S, "records are still unwritten")


def kill(pid: int) -> float:
    """Send SIGKILL. Return the moment from which its sockets are closed: what was sent before that was sent."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while _holds_sockets(pid):
            time.sleep(0.001)
    return time.monotonic()


def _holds_sockets(pid: int) -> bool:
    """Return whether the process still has open sockets; a zombie without threads has none."""
    return proc.is_alive(pid) or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1


async def until(holds: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until it holds; the check runs in a thread, beside the load.

    Raises:
        TimeoutError: it does not hold in time.
    """
    if not await process.until(lambda: asyncio.to_thread(holds), seconds):
        raise TimeoutError(f"after {seconds:.0f} s {what}")


@contextlib.contextmanager
def running_scene(settings: Settings, ranks: tuple[int, int], console: Console) -> Iterator[Scene]:
    """Start a stack on an empty folder, and watch it from a thread as `whetstone up` does."""
    sets = Sets(settings, settings.data / "sets", settings.seed, ranks)
    over, died = threading.Event(), list[str]()

    def watch(stack: Stack) -> None:
        try:
            while not over.wait(0.5):
                for name in stack.watch():
                    console.print(f"[dim]{name} was started again[/dim]")
        except StartFailed as error:
            died.append(str(error))

    with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
        watcher = threading.Thread(target=watch, args=(stack,), daemon=True)
        watcher.start()
        scene = Scene(stack, sets)
        try:
            yield scene
        finally:
            over.set()
            watcher.join()
            scene.close()
    if died:
        raise StartFailed(died[0])


@contextlib.contextmanager
def unlike_servers(settings: Settings, folder: Path, console: Console) -> Iterator[tuple[str, str]]:
    """Start two servers outside of `up`; the second accepts only adapters of half the rank. Yield their addresses."""
    console.print("[dim]starting two vLLM servers[/dim]")
    rank = settings.trainer.lora_rank
    small = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"lora_rank": rank // 2})})
    with process.running_vllms(folder, {"takes-all": settings, "takes-small": small}) as (first, second):
        yield first, second
