"""Check that two hosts without a shared folder serve and train, and that losing one fails only what is in flight there.

Each host has an address of its own (127.0.0.2 and 127.0.0.3), a data folder of its own, a vLLM server, a puller and a
proxy; the first also judges and trains. PostgreSQL, Redis and an adapter store (moto's S3) stand between them. The
demo's agent plays through a load balancer while the policy trains. Then the second host is killed and comes back, then
the first. Exit 0 only if the policy learned, no more requests failed than were in flight on the host that was lost,
each host serves the live version after its return, and each model server loaded what its own puller had pulled.
Needs s3fs and moto[server]. Loopback only.
"""

import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults.hosts.balancer import Balancer
from benchmarks.faults.hosts.host import START_S, Host, Ports
from benchmarks.faults.store.__main__ import BUCKET, LOGIN, PREFIX, running_store
from benchmarks.kit.check import counted, figures_table, verdict
from benchmarks.kit.harness import opened, prepared, present
from benchmarks.kit.options import parser_of
from benchmarks.kit.postgres import Postgres
from benchmarks.kit.process import ROOT, await_true, running_broker
from benchmarks.learning.policy import LearningPolicy
from whetstone.config.settings import BOOTSTRAP_VARIABLE, Settings, load
from whetstone.demo.agent_process import app, report_of
from whetstone.domain import stats
from whetstone.registry.api_key_store import ensure_bootstrap
from whetstone.stack.stack import Stack, free_ports
from whetstone.stack.supervisor import Supervisor

AGENT = ROOT / "whetstone" / "demo" / "tictactoe" / "agent.py"
ADDRESSES = ("127.0.0.2", "127.0.0.3")
KEY = secrets.token_hex(32)
"""The proxies can be reached from other machines, so they ask for a key."""
AGENT_OPTIONS = ("--api-key", KEY, "--games", "0", "--connections", "16", "--pause-s", "0.25")
SETTLES_S = 10.0
"""After a loss: what was in flight has failed by then."""


def _figures(step: dict[str, Any]) -> str:
    return f"{step['trajectories']} games  reward {step['reward_mean']:.3f}  {step['seconds']:.1f} s"


class Run:
    """The hosts, the agent and the policy."""

    def __init__(self, hosts: Sequence[Host], balancer: Balancer, settings: Settings, console: Console) -> None:
        self.hosts, self.balancer, self.console = hosts, balancer, console
        # Each host has a supervisor of its own.
        self.stack = Stack(hosts[0].settings, Supervisor(settings.data / "logs"), balancer.url)
        self.policy = LearningPolicy(self.stack, AGENT, _figures, console, ["--api-key", KEY])
        self.lost: list[tuple[str, int, int, float]] = []
        """Host, failed requests, most that were in flight there, seconds until it served the live version again."""
        self.faults: list[str] = []

    def train(self, steps: int, seed: int) -> None:
        """Let the agent play until so many more steps have ended."""
        with app(self.stack, AGENT, ["--seed", str(seed), *AGENT_OPTIONS]) as agent:
            self.policy.await_steps(steps, agent)
            agent.terminate()
            report = report_of(agent, self.stack)
        if report["failed_requests"]:
            self.faults.append(f"{report['failed_requests']} requests failed while both hosts were there")

    def lose(self, host: Host) -> None:
        """Kill a host while the agent plays; have it come back, and serve the live version."""
        address = (host.address, host.ports.proxy)
        with app(self.stack, AGENT, ["--seed", str(len(self.lost)), *AGENT_OPTIONS]) as agent:
            await_true(lambda: self.balancer.connections(address) > 0, "a request is on the host", 60)
            time.sleep(SETTLES_S)
            in_flight = self.balancer.connections(address)
            host.lose()
            time.sleep(SETTLES_S)
            agent.terminate()
            report = report_of(agent, self.stack)
        began = time.monotonic()
        host.start_serving()
        host.await_ready()
        host.start_others()
        host.await_ready()
        await_true(lambda: self.policy.live in host.loaded, "the host has the live version", START_S)
        self.lost.append((host.address, report["failed_requests"], in_flight, time.monotonic() - began))
        self.console.print(
            f"{host.address} lost: {report['games']} games went on, {report['failed_requests']} requests failed, "
            f"{in_flight} connections were there; it serves {self.policy.live} again after {self.lost[-1][3]:.0f} s",
            highlight=False,
        )
        if report["failed_requests"] > in_flight:
            self.faults.append(
                f"{report['failed_requests']} requests failed when {host.address} was lost; {in_flight} were in flight"
            )
        if not report["games"]:
            self.faults.append(f"no game ended while {host.address} was away")

    def measure(self, games: int) -> tuple[list[int], list[int]]:
        """Return which held-out games the base model and the live version win."""
        held_out = ["--split", "eval", "--games", str(games), "--connections", "16"]
        base = f"{self.stack.settings.policy}@v0"
        before, after = (self.policy.run(*held_out, "--model", name)["won"] for name in (base, self.policy.live))
        return before, after


def prove(data: Path, steps: int, games: int, seed: int, console: Console) -> tuple[dict[str, str], list[str]]:
    """Make the run. Return its figures, and what does not hold."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(contextlib.closing(Postgres()))
        store_port = stack.enter_context(running_store(data / "store.log"))
        os.environ.update(LOGIN, AWS_ENDPOINT_URL=f"http://127.0.0.1:{store_port}")  # s3fs reads it
        puller_port, *ports = free_ports(5)
        each = [Ports(*ports[:2]), Ports(*ports[2:])]
        settings = load(
            environment={},
            data=data,
            seed=seed,
            database=postgres.url,
            broker=stack.enter_context(running_broker()),
            vllm__urls=tuple(f"http://{address}:{one.vllm}" for address, one in zip(ADDRESSES, each, strict=True)),
            adapters__store=f"s3://{BUCKET}/{PREFIX}",
            adapters__puller_port=puller_port,
        )
        engine = stack.enter_context(prepared(settings))
        hosts = []
        for place, (address, of_host) in enumerate(zip(ADDRESSES, each, strict=True)):
            folder = data / f"host{place + 1}"
            folder.mkdir()
            host = Host(address, settings.model_copy(update={"data": folder}), of_host, works=place == 0)
            stack.callback(host.supervisor.stop)
            hosts.append(host)
        ensure_bootstrap(engine, hosts[0].settings, {BOOTSTRAP_VARIABLE: KEY})
        for host in hosts:
            host.start_serving()
        for host in hosts:
            host.await_ready()
            host.start_others()
        for host in hosts:
            host.await_ready()
        console.print(f"both hosts serve after {time.monotonic() - began:.0f} s", highlight=False)
        balancer = Balancer([(host.address, host.ports.proxy) for host in hosts])
        stack.enter_context(balancer.running())
        run = Run(hosts, balancer, settings, console)
        run.policy.set_state("training")
        run.train(steps // 2, seed=2)
        for host in reversed(hosts):
            run.lose(host)
        run.train(steps - steps // 2, seed=3)
        run.policy.set_state("paused")
        before, after = run.measure(games)
        strangers = [
            f"{host.address} loaded {name} from {folder}"
            for host in hosts
            for name, folder in host.loaded.items()
            if not folder.is_relative_to(host.settings.data)
        ]
        versions = [len(host.loaded) for host in hosts]
        states = Counter(step["state"] for step in run.policy.steps)
        failed = run.policy.failed_requests
    won, gain = [stats.share(each) for each in (before, after)], stats.gain(before, after)
    return {
        "steps": counted(states),
        "held-out games won": f"{won[0].mean:.1%} -> {won[1].mean:.1%}",
        "gain": f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})",
        **{
            f"{address} lost: failed, in flight, back after": f"{lost}, at most {most}, {took_s:.0f} s"
            for address, lost, most, took_s in run.lost
        },
        "adapters on each model server at the end": " and ".join(map(str, versions)),
        "seconds": f"{time.monotonic() - began:.0f}",
    }, [
        *run.faults,
        *strangers,
        *present(
            {
                "the policy did not learn": gain.low <= 0,
                f"{failed} requests failed in measuring": failed,
                "a model server has no adapter": 0 in versions,
            }
        ),
    ]


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether two hosts without a shared folder serve and train, and one can be lost.",
        {
            "--steps": {"type": int, "default": 16, "help": "half of them before the losses"},
            "--games": {"type": int, "default": 400, "help": "held-out games of each of the two versions"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the openings"},
            "--data": {"type": Path, "help": "an empty folder for the hosts' folders and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    with opened("hosts", args.data) as (data, console):
        figures, faults = prove(data, args.steps, args.games, args.seed, console)
    console.print(figures_table(figures))
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
