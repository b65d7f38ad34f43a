"""Fuzz the proxy with schemathesis and hypothesis: right and wrong requests, no 5xx and no incomplete record.

Starts an instant model server and a proxy of its own, sends what the OpenAPI document allows and forbids, damaged
bodies and headers on every route, and bytes that are hardly HTTP; then stops the proxy and checks its answers, its log
and its tables. The same seed gives the same cases. Loopback only. Exit 0 only if everything holds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httptools
import hypothesis
import requests
import schemathesis
from rich.console import Console
from rich.table import Table
from schemathesis import Case, GenerationMode

from benchmarks.fakes.instant_vllm import Instant
from benchmarks.fuzz import cases
from benchmarks.fuzz.asks import Answer, ask, wrong_with
from benchmarks.fuzz.records import counts, wrong_with_records
from benchmarks.kit.check import data_folder, verdict
from benchmarks.kit.postgres import database_url
from benchmarks.kit.process import DRAIN_S, START_S, STOP_S, prepare, running_proxy, state, unhandled, until
from whetstone.config.settings import BOOTSTRAP_VARIABLE, load
from whetstone.database.engine import connect

CASES = 20_000
SHARES = {"document": 0.3, "requests": 0.5, "bytes": 0.2}
"""Shares of the cases: as OpenAPI allows or forbids, HTTP with any content, and bytes that may be no HTTP."""
FAILS_EVERY = 40
"""The model server answers one in this many calls with 500."""
MOST_FAULTS = 20
MAKES_KEYS = "POST /admin/keys"
"""Once there is a key, the proxy requires one: a run without keys does not create any."""
RUNS = (("sqlite", False), ("postgresql", True))
"""Database, and whether the proxy requires keys."""
WRITTEN = ("/v1/feedback", "/end", "/close")


class Run:
    """One run against one database: `go`, then `report`."""

    def __init__(self, cases: int, seed: int, data: Path, database: str | None, *, keys: bool) -> None:
        self._cases, self._seed, self._log = cases, seed, data / "proxy.log"
        self._key = f"fuzz-{secrets.token_hex(32)}" if keys else None
        self._headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._calls: set[str] = set()
        self._feedback: set[str] = set()
        self._statuses: dict[str, Counter[str]] = {kind: Counter() for kind in SHARES}
        self._faults: list[str] = []
        self._loop = asyncio.new_event_loop()
        """In a thread of its own, with the model server."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._vllm = Instant(("starter@v0",), fails_every=FAILS_EVERY, on_call=self._calls.add)
        self._settings = load(
            environment={},
            data=data,
            database=database,
            # There is no broker: hints are lost, which does not matter here.
            broker="redis://127.0.0.1:1/0",
            vllm__urls=(self._await(self._vllm.start()),),
            proxy__headers_timeout_s=5.0,
            proxy__body_timeout_s=5.0,
        )

    def go(self) -> None:
        """Start, send everything, stop."""
        prepare(self._settings)
        secret = {} if self._key is None else {BOOTSTRAP_VARIABLE: self._key}
        with running_proxy(self._settings, self._log, **secret) as (url, process):
            if not self._await(until(lambda: _started(process, url), START_S)) or process.poll() is not None:
                sys.exit(f"the proxy did not start:\n{self._log.read_text()}")
            began = time.perf_counter()
            for kind, send in (("document", self._document), ("requests", self._requests), ("bytes", self._bytes)):
                send(url, int(self._cases * SHARES[kind]))
            self._took_s = time.perf_counter() - began
            if process.poll() is not None:
                self._faults.append(f"the proxy has died: {process.returncode}")
            elif not self._await(until(lambda: _is_ready(url), DRAIN_S)):
                self._faults.append(f"it is not ready afterwards: {self._await(_state(url))}")
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.returncode != 0:
                self._faults.append(f"the proxy stopped with {process.returncode}")
        self._loop.call_soon_threadsafe(self._vllm.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def report(self, console: Console) -> int:
        """Print the result; return the exit code."""
        self._faults += unhandled(self._log.read_text(encoding="utf-8", errors="replace"))
        if left := sorted(path.name for path in (self._settings.data / "journal").iterdir()):
            self._faults.append(f"left in the journal: {left}")
        engine = connect(self._settings.database_url)
        self._faults += wrong_with_records(engine, self._calls, self._feedback)
        kind, keys = engine.dialect.name, "without keys" if self._key is None else "with keys"
        table = Table("cases", "sent", "answers by status", title=f"fuzz on {kind}, {keys}, seed {self._seed}")
        for name, statuses in self._statuses.items():
            by_status = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            table.add_row(name, str(int(self._cases * SHARES[name])), by_status)
        rows = ", ".join(f"{count} {name}" for name, count in counts(engine).items())
        table.add_row("together", str(self._cases), f"{self._took_s:.0f} s; {len(self._calls)} calls answered; {rows}")
        engine.dispose()
        console.print(table)
        return verdict(self._faults, console)

    def _document(self, url: str, count: int) -> None:
        document = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=self._headers)
        chosen = [
            (operation, mode)
            for operation in (result.ok() for result in document.get_all_operations())
            for mode in GenerationMode
            if mode is GenerationMode.POSITIVE or "requestBody" in operation.definition.raw
            if self._key is not None or operation.label != MAKES_KEYS
        ]
        with requests.Session() as session:
            session.trust_env = False

            def send(case: Case) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = "starter"  # any other name ends at once with 404
                response = case.call(session=session, headers=self._headers, timeout=60)
                answer = Answer(response.status_code, {k: v[0] for k, v in response.headers.items()}, response.content)
                self._note("document", answer, case.as_curl_command, case.path, head=case.method == "HEAD")

            for operation, mode in chosen:
                self._each(operation.as_strategy(generation_mode=mode), 1 + count // len(chosen), send)

    def _requests(self, url: str, count: int) -> None:
        key = tuple((name.lower().encode(), value.encode()) for name, value in self._headers.items())

        def send(request: cases.Request) -> None:
            if self._key is not None or not f"{request.method} {request.target.decode()}".startswith(MAKES_KEYS):
                request = replace(request, headers=(*key, *request.headers))
                self._send("requests", url, request.wire(), request)

        self._each(cases.requests(), count, send)

    def _bytes(self, url: str, count: int) -> None:
        self._each(cases.streams, count, lambda data: self._send("bytes", url, data, None))

    def _each(self, strategy: Any, count: int, send: Callable[[Any], None]) -> None:
        """Send this many examples, the same with the same seed."""

        @hypothesis.seed(self._seed)
        @hypothesis.given(strategy)
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def every(example: Any) -> None:
            if len(self._faults) < MOST_FAULTS:
                send(example)

        every()

    def _send(self, kind: str, url: str, data: bytes, request: cases.Request | None) -> None:
        try:
            answers = ask(url, data, patient=request is not None and _may_be_answered(request))
        except (OSError, httptools.HttpParserError) as error:
            self._fault(f"{type(error).__name__}: {error}", lambda: repr(data))
            return
        path = "" if request is None else request.target.decode()
        for answer in answers:
            if answer.status:
                head = (request is None or request.method == "HEAD") and not answer.body
                self._note(kind, answer, lambda: repr(data), path, head=head)
        if not answers:
            self._statuses[kind]["none"] += 1

    def _note(self, kind: str, answer: Answer, case: Callable[[], str], path: str, *, head: bool) -> None:
        self._statuses[kind][str(answer.status)] += 1
        if fault := wrong_with(answer.status, answer.headers, answer.body, head=head):
            self._fault(fault, case)
        if answer.status == 202 and path.split("?")[0].endswith(WRITTEN):
            items = json.loads(answer.body)
            self._feedback |= {one["id"] for one in (items if isinstance(items, list) else [items])}

    def _fault(self, what: str, case: Callable[[], str]) -> None:
        self._faults.append(f"{what}\n  {case()[:2000]}")


def _may_be_answered(request: cases.Request) -> bool:
    """Return whether an answer is certain: headers may announce more data than there is, or split one request."""
    framing = (b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect")
    return not any(name.lower() in framing for name, _ in request.headers)


async def _state(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        return await state(session, url)


async def _started(process: subprocess.Popen[bytes], url: str) -> bool:
    """Return whether the proxy is ready to serve, or has died."""
    return process.poll() is not None or await _is_ready(url)


async def _is_ready(url: str) -> bool:
    return (await _state(url)).get("status") == "ok"


def main() -> int:
    """Run the fuzzing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=CASES, help="on each database")
    parser.add_argument("--seed", type=int, default=1, help="decides every case")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--keys", choices=("yes", "no"), help="the proxy asks for keys, and the cases have an admin's")
    args = parser.parse_args()
    console, exit_code = Console(width=120), 0
    with data_folder("fuzz", None) as folder:
        for kind, keys in (run for run in RUNS if args.database in (run[0], "both")):
            data = folder / kind
            data.mkdir()
            with database_url(kind) as database:
                run = Run(args.cases, args.seed, data, database, keys=args.keys == "yes" if args.keys else keys)
                run.go()
                exit_code |= run.report(console)
    return exit_code


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")
    sys.exit(main())
