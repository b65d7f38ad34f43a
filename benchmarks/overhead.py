"""What the proxy costs: the same chat requests straight to an instant upstream, and through the proxy, in turns.

Prints requests per second, streams per second, added milliseconds at p50 and p99, and their ratios. Loopback only,
bounded by --seconds.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.running import running_proxy
from migrations.database import connect
from migrations.run import upgrade
from whetstone.settings import load
from whetstone.store import Store

TOKENS = 64
ROUNDS = 3
ROOT = Path(__file__).resolve().parent.parent


def canned() -> tuple[bytes, list[bytes]]:
    """An answer of TOKENS tokens as vLLM gives it with capture on: whole, and as events."""
    logprob = {"token": "x", "logprob": -0.6931471824645996, "bytes": [120], "top_logprobs": []}
    top = {"id": "chatcmpl-bench", "created": 1, "model": "bench@v0"}
    ids = list(range(TOKENS))
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * TOKENS},
        "logprobs": {"content": [logprob] * TOKENS},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    usage = {"prompt_tokens": TOKENS, "completion_tokens": TOKENS, "total_tokens": 2 * TOKENS}
    whole = {**top, "object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": ids}
    events = []
    for place in range(TOKENS):
        delta = {"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [logprob]}, "token_ids": [place]}
        chunk: dict[str, Any] = {**top, "object": "chat.completion.chunk", "choices": [delta]}
        if place == 0:
            chunk["prompt_token_ids"] = ids
        events.append(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")
    return json.dumps(whole, separators=(",", ":")).encode(), [*events, b"data: [DONE]\n\n"]


_WHOLE, _EVENTS = canned()


async def upstream(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The instant upstream, for uvicorn."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["method"] == "GET":  # how it is, and what it serves
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data": [{"id": "bench@v0"}]}'})
        return
    streamed = b'"stream":true' in body
    kind = b"text/event-stream" if streamed else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for event in _EVENTS if streamed else ():
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"" if streamed else _WHOLE})


async def load_test(url: str, stream: bool, connections: int, seconds: float) -> list[float]:
    """Ask for so long; the milliseconds of each answer."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": "hello"}],
        **({"stream": True} if stream else {}),
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def ask(session: aiohttp.ClientSession) -> None:
        while (began := time.perf_counter()) < until:
            async with session.post(url + "/v1/chat/completions", data=data, headers=headers) as response:
                answer = await response.read()
            if response.status != 200 or not answer:
                raise SystemExit(f"{url} answered {response.status}: {answer[:300]!r}")
            took.append((time.perf_counter() - began) * 1000)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
        await asyncio.gather(*(ask(session) for _ in range(connections)))
    return took


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--durability", default="journal", help="setting proxy.durability: journal, fsync or async")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whetstone-bench-") as folder:
        port, log = _free_port(), Path(folder) / "proxy.log"
        direct = f"http://127.0.0.1:{port}"
        # The broker is nobody: hints are lost, which costs nothing here.
        settings = load(
            environment={},
            data=Path(folder),
            policy="bench",
            broker="redis://127.0.0.1:1/0",
            vllm__urls=(direct,),
            proxy__durability=args.durability,
        )
        upgrade(settings.database_url)
        Store(connect(settings.database_url)).prepare(settings)
        uvicorn = [sys.executable, "-m", "uvicorn", "--no-access-log", "--log-level", "warning", "--loop", "uvloop"]
        command = [*uvicorn, "--port", str(port), "benchmarks.overhead:upstream"]
        with subprocess.Popen(command, cwd=ROOT) as model:
            try:
                _await_port(direct)
                with running_proxy(settings, log) as (proxied, _):
                    _await_port(proxied, log)
                    _report(direct, proxied, args.seconds)
            finally:
                model.terminate()


def _report(direct: str, proxied: str, seconds: float) -> None:
    table = Table("what", "connections", "direct /s", "proxy /s", "ratio", "added p50 ms", "added p99 ms")
    for stream in (False, True):
        for connections in (1, 16, 64):
            took: dict[str, list[float]] = {direct: [], proxied: []}
            for _ in range(ROUNDS):
                for url, measured in took.items():
                    measured.extend(asyncio.run(load_test(url, stream, connections, seconds)))
            rates = [len(measured) / (ROUNDS * seconds) for measured in took.values()]
            p50, p99 = (_quantile(took[proxied], share) - _quantile(took[direct], share) for share in (0.5, 0.99))
            table.add_row(
                f"stream of {TOKENS} events" if stream else "plain",
                str(connections),
                *(f"{rate:.0f}" for rate in rates),
                f"{rates[1] / rates[0]:.2f}",
                f"{p50:.2f}",
                f"{p99:.2f}",
            )
    Console().print(table)


def _quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100)[round(share * 100) - 1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(url: str, log: Path | None = None) -> None:
    address = urlsplit(url)
    for _ in range(300):
        try:
            socket.create_connection((address.hostname, address.port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"nobody listens at {url}\n{log.read_text() if log else ''}")


if __name__ == "__main__":
    main()
