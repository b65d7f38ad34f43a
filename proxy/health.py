"""How the whole proxy is: /healthz, /readyz, /metrics, over all projects. Reads; knows no key and no request."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from sqlalchemy.exc import SQLAlchemyError

from proxy.completeness import Completeness
from proxy.keys import is_admin
from proxy.metrics import exposition, queues_of, reasons_of, records_of, redaction_of, servers_of, steps_of, traffic_of
from proxy.policies import Policy, live_names
from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.relayed import relayed
from proxy.replicas import Replicas
from proxy.responses import as_json
from proxy.store import Store
from proxy.store_queues import QueueTables
from proxy.store_steps import StepTables
from proxy.threads import Threads
from proxy.traffic import Traffic

PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})


def add(
    api: FastAPI,
    *,
    projects: Sequence[str],
    policies: Callable[[], Sequence[Policy]],
    threads: Sequence[Threads],
    redactors: Sequence[Redactor],
    store: Store,
    recorder: Recorder,
    replicas: Replicas,
    completeness: Completeness,
    traffic: Traffic,
    data: Path,
    failing: Mapping[str, str],
) -> None:
    """Add the routes of PATHS to `api`; `policies`, `threads` and `redactors` are those of all projects, `failing` the
    tasks whose last turn failed."""
    step_tables = [StepTables(store.engine, project) for project in projects]
    queue_tables = QueueTables(store.engine, projects)

    def from_the_database() -> list[Metric]:
        """Nothing while it is away."""
        now = datetime.now(UTC)
        try:
            reasons = store.reasons(projects, now - timedelta(hours=1))
            steps = [of_one for tables in step_tables for of_one in tables.read()]
            return [*reasons_of(reasons), *queues_of(queue_tables.read(now)), *steps_of(steps)]
        except SQLAlchemyError:
            return []

    def ready() -> bool:
        """There is a policy, a vLLM that has the live versions, and somebody who writes to SQL."""
        live = live_names(policies())
        return bool(live) and replicas.ready(live) and recorder.writes

    @api.get("/health")
    async def health() -> Response:
        """As vLLM answers: 200 while it can serve, else 503; without a body."""
        return Response(status_code=200 if ready() else 503)

    @api.get("/healthz")
    async def healthz() -> Response:
        """The process lives."""
        return as_json({"status": "ok"})

    @api.get("/readyz")
    async def readyz(request: Request) -> Response:
        """It can serve: there is a policy, and a vLLM that has the live versions. More is told to admins alone."""
        serves = ready()
        servers = {one.url: {"state": one.state, "reason": one.reason} for one in replicas}
        state = {
            "status": "ok" if serves else "unavailable",
            "vllm": any(one.healthy for one in replicas),
            "writer": recorder.writes,
            "database": recorder.away_since_s is None,
            "database_away_since": _instant(recorder.away_since_s),
            "unwritten": recorder.unwritten,
            "journal_bytes": recorder.journal_bytes,
            "dropped": recorder.dropped,
            "waiting": replicas.waiting,
            "paused": replicas.held_by is not None,
            "replicas": servers,
            "failing": dict(failing),
        }
        told = state if is_admin(request.scope) else {"status": state["status"]}
        return as_json(told, status=200 if serves else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        share = await completeness.share()
        placed: Counter[str] = sum((one.placed for one in threads), Counter())
        own = [*records_of(recorder, data, completeness.written, share), *traffic_of(traffic, placed)]
        own += [*redaction_of(redactors), *servers_of(replicas)]

        def text() -> bytes:
            return exposition([*own, *from_the_database(), *relayed(completeness.told)])

        # Apart from the event loop, where apps are answered.
        return Response(await asyncio.to_thread(text), media_type=CONTENT_TYPE_LATEST)


def _instant(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
