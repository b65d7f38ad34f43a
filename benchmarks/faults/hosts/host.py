"""One of several hosts on this machine: an address, a data folder, and programs that see no other host's folder."""

import contextlib
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from benchmarks.kit.harness import worker_command
from benchmarks.kit.process import PROGRAM, answers
from whetstone.config.settings import Settings, as_environment
from whetstone.messaging.task_names import JUDGE_QUEUE
from whetstone.stack.stack import training_worker
from whetstone.stack.supervisor import Part, Supervisor
from whetstone.vllm import client

START_S = 180.0


@dataclass(frozen=True)
class Ports:
    """Where a host's programs listen; the puller's port is the same on all hosts (`adapters.puller_port`)."""

    proxy: int
    vllm: int


class Host:
    """A vLLM server, the puller beside it and a proxy; on one host also the workers that judge and train."""

    def __init__(self, address: str, settings: Settings, ports: Ports, *, works: bool) -> None:
        """`settings`: of all hosts, with this one's data folder."""
        self.address, self.ports = address, ports
        self.settings = settings.model_copy(
            update={"proxy": settings.proxy.model_copy(update={"host": address, "port": ports.proxy})}
        )
        self._works = works
        self._logs = settings.data / "logs"
        self.supervisor = Supervisor(self._logs)

    @property
    def proxy_url(self) -> str:
        """The address of its proxy."""
        return f"http://{self.address}:{self.ports.proxy}"

    @property
    def vllm_url(self) -> str:
        """The address of its model server."""
        return f"http://{self.address}:{self.ports.vllm}"

    def start_serving(self) -> None:
        """Start its model server and its puller; `await_ready` waits for them."""
        puller = [sys.executable, "-c", PROGRAM, "puller", "--host", self.address]
        health = f"http://{self.address}:{self.settings.adapters.puller_port}/health"
        self.supervisor.start(Part("puller", puller, self._environment, partial(answers, health), START_S))
        # `whetstone up` starts vLLM for this machine alone.
        command = [
            self.address if word == "127.0.0.1" else word for word in client.command(self.settings, self.ports.vllm)
        ]
        healthy, timeout_s = client.Vllm(self.vllm_url).healthy, self.settings.vllm.start_timeout_s
        self.supervisor.start(Part("vllm", command, client.environment(self.settings), healthy, timeout_s))

    def start_others(self) -> None:
        """Start its proxy and, on the host that works, the workers; `await_ready` waits for them."""
        proxy = [sys.executable, "-P", "-m", "proxy"]
        ready = partial(answers, f"{self.proxy_url}/healthz")
        self.supervisor.start(Part("proxy", proxy, self._environment, ready, START_S, stop_timeout_s=60))
        if self._works:
            judge = worker_command("judge", JUDGE_QUEUE, "--pool", "threads", "--concurrency", "3")
            self.supervisor.start(Part("judge", judge, self._environment, lambda: True))
            self.supervisor.start(training_worker(self.settings, self.supervisor, self._environment))

    def await_ready(self) -> None:
        """Wait until all of its programs are.

        Raises:
            StartFailed: one is not, in time.
        """
        self.supervisor.await_ready(*self.supervisor.pids)

    def lose(self) -> None:
        """Kill all of its programs at once, as when a machine loses its power."""
        for pid in self.supervisor.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, 9)
        self.supervisor.stop()

    @property
    def loaded(self) -> dict[str, Path]:
        """The adapters that its model server has, by name, with the folder that each was loaded from."""
        cards = httpx.get(f"{self.vllm_url}/v1/models", timeout=10, trust_env=False).json()["data"]
        return {card["id"]: Path(card["root"]) for card in cards if card.get("parent")}

    @property
    def _environment(self) -> dict[str, str]:
        return as_environment(self.settings, config=Path(os.devnull))
