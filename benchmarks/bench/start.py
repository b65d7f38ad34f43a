"""Start and configure each side: the upstream, the proxy in its forms, nginx, LiteLLM, any other proxy."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.bench.client import Target
from benchmarks.bench.sides import DIRECT, SQL_OFF, START_S, Side, on_cores
from benchmarks.bench.upstream import TALLY
from benchmarks.kit.process import ROOT, prepare, running_broker, running_proxy
from whetstone.config.settings import BOOTSTRAP_VARIABLE, load
from whetstone.stack.stack import free_ports

ROOM = 4096
"""Connections and requests at once that the proxy allows here: 2,000 streams stay open."""
FORMS: dict[str, dict[str, Any]] = {
    "whetstone": {},
    "async": {"proxy__durability": "async"},
    "capture off": {},
    SQL_OFF: {},
}
"""The proxy with everything on, and with one feature less each: settings in addition to the common settings."""
NGINX = """\
daemon off; worker_processes 1; worker_rlimit_nofile 16384; error_log stderr crit; pid {folder}/nginx.pid; {user}
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
    uwsgi_temp_path {folder}; scgi_temp_path {folder};
    keepalive_requests 1000000000;
    upstream model {{ server {host}; keepalive 1024; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://model; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""
LITELLM = """\
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench@v0, api_base: "{upstream}/v1", api_key: none, max_retries: 0}}
litellm_settings: {{telemetry: false}}
"""
CONFIG = "config.yaml"
KEY = f"sk-{secrets.token_hex(32)}"
"""The apps' key of every proxy: LiteLLM requires one, as ours does."""
AUTHORIZATION = f"authorization: Bearer {KEY}\r\n"
QUIET_LITELLM = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MASTER_KEY": KEY,
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
}


@dataclass(frozen=True)
class Peer:
    """How to start and address any other proxy."""

    command: str
    """Contains {port} and {upstream}, and may contain {binary} and {folder}, a folder of its own."""
    binary: str = ""
    base: str = "/v1"
    """The path before `/chat/completions`."""
    config: str = ""
    """Contents of CONFIG in its folder."""
    keyed: bool = True
    """Apps send KEY."""


PEERS = {
    "nginx": Peer(f"{{binary}} -p {{folder}} -c {{folder}}/{CONFIG}", config=NGINX, keyed=False),
    "litellm": Peer(
        f"{{binary}} --config {{folder}}/{CONFIG} --host 127.0.0.1 --port {{port}} --num_workers 1",
        config=LITELLM,
    ),
    "rllm": Peer(
        "{binary} --host 127.0.0.1 --port {port} --worker {upstream}/v1 --db-path {folder}/rllm.db --log-level warning",
        base="/sessions/bench/v1",
    ),
}
"""A bare reverse proxy with persistent connections, the ideal to approach; LiteLLM's proxy, with one worker and no
database; rLLM's model gateway with SQLite, which stores nothing without a session in the path.
"""


@contextmanager
def upstream() -> Iterator[Side]:
    """Start the upstream alone, in its own process; its side also includes this process, which sends the requests."""
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.bench.upstream", "--port", str(port)]
    with _process(command, address + "/health", Path(os.devnull)) as process:
        cores = min(2, len(os.sched_getaffinity(process.pid)))
        yield Side(DIRECT, (Target(address, "bench"),), (process.pid, os.getpid()), cores)


def tally(address: str) -> dict[str, int]:
    """Return the upstream's counts since its start."""
    return httpx.get(address + TALLY, timeout=30).json()  # type: ignore[no-any-return]


@contextmanager
def proxy(
    form: str,
    model_server: str,
    broker: str,
    folder: Path,
    cores: list[set[int]],
    under: Sequence[str] = (),
    **more: Any,
) -> Iterator[Side]:
    """Start Whetstone in one of FORMS, with a worker on each of `cores` and a key for its apps.

    `under`: a command that runs it, `more`: settings.
    """
    captured = form != "capture off"
    other = {"rest": {"url": model_server + "/v1", "models": {"bench": "bench"}}}
    settings = load(
        environment={},
        data=folder,
        policy="bench" if captured else "other",
        upstreams={} if captured else other,
        broker=broker,
        vllm__urls=(model_server,),
        proxy__max_connections=ROOM,
        proxy__max_in_flight=ROOM,
        # No line for each call: the peers write none either.
        log__level="warning",
        **FORMS[form] | more,
    )
    folder.mkdir(parents=True, exist_ok=True)
    prepare(settings)
    with ExitStack() as stack:
        targets, pids = [], []
        for place, of_worker in enumerate(cores):
            log = folder / f"proxy-{place}.log"
            with on_cores(of_worker):
                started = running_proxy(settings, log, under, **{BOOTSTRAP_VARIABLE: KEY})
                url, process = stack.enter_context(started)
            targets.append(Target(url, "bench", AUTHORIZATION))
            pids.append(process.pid)
            _await(url + "/healthz", process, log)
        name = "whetstone" if form == "whetstone" else f"whetstone, {form}"
        name += "" if len(cores) == 1 else f", {len(cores)} workers"
        side = Side(name, tuple(targets), tuple(pids), len(cores), settings, form)
        side.wait_written()
        yield side


@contextmanager
def peer(name: str, proxy: Peer, model_server: str, folder: Path, cores: set[int]) -> Iterator[Side]:
    """Start any other proxy."""
    (port,) = free_ports(1)
    url, host = f"http://127.0.0.1:{port}", urlsplit(model_server).netloc
    user = "user root;" if os.geteuid() == 0 else ""
    values = {"port": port, "upstream": model_server, "host": host, "folder": folder, "user": user}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(proxy.config.format(**values))
    command = [word.format(binary=proxy.binary, **values) for word in shlex.split(proxy.command)]
    with _process(command, url, folder / "log", cores, **QUIET_LITELLM) as process:
        yield Side(name, (Target(url, "bench", AUTHORIZATION if proxy.keyed else "", proxy.base),), (process.pid,))


@contextmanager
def _process(
    command: list[str], url: str, log: Path, cores: set[int] | None = None, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    # Only the child: otherwise the load generator would then share the core of the measured side.
    with on_cores(cores or os.sched_getaffinity(0)), log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more}, stdout=out, stderr=out)
    try:
        _await(url, process, log)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers there, with any status."""
    until_s = time.perf_counter() + START_S
    while time.perf_counter() < until_s and process.poll() is None:
        try:
            httpx.get(url, timeout=5)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"no answer at {url}:\n{log.read_text(errors='replace')[-3000:]}")


@contextmanager
def started(forms: list[str], peers: Mapping[str, Peer], folder: Path, own: list[set[int]]) -> Iterator[list[Side]]:
    """Start all sides; yield them, the upstream first.

    Ours run on the first of `own`, with two workers on the first two if there are as many; so do the peers.
    """
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker())
        direct = stack.enter_context(upstream())
        url = direct.target.url
        sides = [proxy(form, url, broker, folder / form.replace(" ", "-"), own[:1]) for form in forms]
        if len(own) > 1 and "whetstone" in forms:
            sides.append(proxy("whetstone", url, broker, folder / "workers", own))
        sides += [peer(name, proxy, url, folder / name, own[0]) for name, proxy in peers.items()]
        yield [direct, *map(stack.enter_context, sides)]
