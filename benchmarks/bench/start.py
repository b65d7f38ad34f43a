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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.bench.client import Target
from benchmarks.bench.sides import DIRECT, SQL_OFF, START_S, Side, on_cores
from benchmarks.bench.upstream import TALLY
from benchmarks.kit.process import ROOT, running_broker, running_proxy
from migrations.run import upgrade
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.domain.api_keys import hash_of, new_key
from whetstone.registry import api_key_store
from whetstone.registry.projects import Store
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
    upstream model {{ server {upstream}; keepalive 1024; keepalive_requests 1000000000; }}
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
CONFIG = "litellm.yaml"
QUIET_LITELLM = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
}


@contextmanager
def upstream() -> Iterator[Side]:
    """Start the upstream alone, in its own process; its side also includes this process, which sends the requests."""
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.bench.upstream", "--port", str(port)]
    with _process(command, address + "/health", os.devnull) as process:
        cores = min(2, len(os.sched_getaffinity(process.pid)))
        yield Side(DIRECT, (_target(address, "bench"),), (process.pid, os.getpid()), cores)


def tally(address: str) -> dict[str, int]:
    """Return the upstream's counts since its start."""
    counts: dict[str, int] = httpx.get(address + TALLY, timeout=30).json()
    return counts


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
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    Store(engine).prepare(settings)
    key_id, key = new_key()
    with engine.begin() as connection:
        made = api_key_store.KeyRecord(settings.home, "bench", ["inference", "admin"], datetime.now(UTC))
        api_key_store.create(connection, made, key_id, hash_of(key.encode()))
    engine.dispose()
    with ExitStack() as stack:
        targets, pids = [], []
        for place, of_worker in enumerate(cores):
            with on_cores(of_worker):
                started = running_proxy(settings, folder / f"proxy-{place}.log", under)
                url, process = stack.enter_context(started)
            targets.append(_target(url, "bench", f"authorization: Bearer {key}\r\n"))
            pids.append(process.pid)
            _await(url + "/healthz", process, folder / f"proxy-{place}.log")
        name = "whetstone" if form == "whetstone" else f"whetstone, {form}"
        name += "" if len(cores) == 1 else f", {len(cores)} workers"
        side = Side(name, tuple(targets), tuple(pids), len(cores), settings, form)
        side.wait_written()
        yield side


@contextmanager
def nginx(binary: str, model_server: str, folder: Path, cores: set[int]) -> Iterator[Side]:
    """Start a bare reverse proxy with persistent connections: the ideal to approach."""
    user = "user root;" if os.geteuid() == 0 else ""
    (port,), config = free_ports(1), folder / "nginx.conf"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(NGINX.format(folder=folder, upstream=urlsplit(model_server).netloc, port=port, user=user))
    command = [binary, "-p", str(folder), "-c", str(config)]
    with _process(command, f"http://127.0.0.1:{port}/health", folder / "nginx.log", cores) as process:
        yield Side("nginx", (_target(f"http://127.0.0.1:{port}", "bench"),), (process.pid,))


@dataclass(frozen=True)
class Peer:
    """How to start and address any other proxy."""

    command: str
    """Contains {port} and {upstream}, and may contain {folder}, a folder of its own with a configuration for LiteLLM.
    """
    base: str = "/v1"
    """The path before `/chat/completions`."""


@contextmanager
def peer(name: str, proxy: Peer, model_server: str, folder: Path, cores: set[int]) -> Iterator[Side]:
    """Start any other proxy. LiteLLM requires a key, as ours does."""
    (port,) = free_ports(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(LITELLM.format(upstream=model_server))
    words = [one.format(port=port, upstream=model_server, folder=folder) for one in shlex.split(proxy.command)]
    url, key = f"http://127.0.0.1:{port}", f"sk-{secrets.token_hex(32)}"
    environment = QUIET_LITELLM | {"LITELLM_MASTER_KEY": key}
    with _process(words, url, folder / "log", cores, **environment) as process:
        yield Side(name, (_target(url, "bench", f"authorization: Bearer {key}\r\n", proxy.base),), (process.pid,))


def litellm(binary: str) -> Peer:
    """Return LiteLLM's proxy, with one worker and no database."""
    return Peer(f"{shlex.quote(binary)} --config {{folder}}/{CONFIG} --host 127.0.0.1 --port {{port}} --num_workers 1")


def rllm(binary: str) -> Peer:
    """Return rLLM's model gateway with SQLite. It stores nothing without a session in the path."""
    options = "--host 127.0.0.1 --port {port} --worker {upstream}/v1 --db-path {folder}/rllm.db --log-level warning"
    return Peer(f"{shlex.quote(binary)} {options}", "/sessions/bench/v1")


def _target(url: str, model: str, headers: str = "", base: str = "/v1") -> Target:
    parts = urlsplit(url)
    assert parts.hostname and parts.port
    return Target(parts.hostname, parts.port, model, headers, base)


@contextmanager
def _process(
    command: list[str], url: str, log: str | Path, cores: set[int] | None = None, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    path = Path(log)
    # Only the child: otherwise the load generator would then share the core of the measured side.
    with on_cores(cores or os.sched_getaffinity(0)), path.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more}, stdout=out, stderr=out)
    try:
        _await(url, process, path)
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
def started(
    forms: list[str], nginx_binary: str | None, peers: Mapping[str, Peer], folder: Path, own: list[set[int]]
) -> Iterator[tuple[str, list[Side]]]:
    """Start all sides; yield the upstream's address and the sides.

    Ours run on the first of `own`, with two workers on the first two if there are as many; so do the peers.
    """
    with ExitStack() as stack:
        broker = stack.enter_context(running_broker())
        direct = stack.enter_context(upstream())
        address = f"http://{direct.target.host}:{direct.target.port}"
        ours = [proxy(form, address, broker, folder / form.replace(" ", "-"), own[:1]) for form in forms]
        if len(own) > 1 and "whetstone" in forms:
            ours.append(proxy("whetstone", address, broker, folder / "workers", own))
        others = [nginx(nginx_binary, address, folder / "nginx", own[0])] if nginx_binary else []
        others += [peer(name, proxy, address, folder / name, own[0]) for name, proxy in peers.items()]
        yield address, [direct, *map(stack.enter_context, [*ours, *others])]
