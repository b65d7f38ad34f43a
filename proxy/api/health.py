"""Serve the health of the whole proxy, across all projects: /healthz, /readyz, /metrics."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import Metric
from sqlalchemy.exc import SQLAlchemyError

from proxy.api.bodies import as_json
from proxy.domain.policies import Policy, live_names
from proxy.http.asgi import is_admin
from proxy.metrics.clock import ClockJump
from proxy.metrics.exposition import (
    exposition,
    queues_of,
    reasons_of,
    records_of,
    redaction_of,
    servers_of,
    spending_of,
    steps_of,
    traffic_of,
)
from proxy.metrics.patient_reader import PatientReader
from proxy.metrics.store import MetricTables
from proxy.metrics.traffic import Traffic
from proxy.metrics.vllm import Completeness, relabelled
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.recording.store import Store
from proxy.trajectories.resolver import TrajectoryResolver
from proxy.upstream.load_balancer import Replicas
from proxy.upstream.spending import SpendingCap


def add(
    api: FastAPI,
    *,
    projects: Sequence[str],
    policies: Callable[[], Sequence[Policy]],
    threads: Sequence[TrajectoryResolver],
    redactors: Sequence[Redactor],
    store: Store,
    recorder: Recorder,
    replicas: Replicas,
    completeness: Completeness,
    traffic: Traffic,
    data: Path,
    failing: Mapping[str, str],
    spending: SpendingCap,
) -> None:
    """Add the routes of `routes.HEALTH` to `api`.

    `policies`, `threads` and `redactors` are those of all projects. `failing` holds the tasks whose last run failed.
    """
    tables, clock = MetricTables(store.engine, projects), ClockJump()
    reader = PatientReader()

    def from_the_database() -> list[Metric]:
        """Return the metrics from the database, or none while it is down."""
        now = datetime.now(UTC)
        try:
            reasons = store.reasons(projects, now - timedelta(hours=1))
            return [*reasons_of(reasons), *queues_of(tables.queues(now)), *steps_of(tables.steps())]
        except SQLAlchemyError:
            return []

    def ready() -> bool:
        """Return whether there is a policy, a vLLM that has the live versions, and a live writer thread for SQL."""
        live = live_names(policies())
        return bool(live) and replicas.ready(live) and recorder.writes

    @api.get("/health")
    async def health() -> Response:
        """Answer as vLLM does: 200 while the proxy can serve, else 503, without a body."""
        return Response(status_code=200 if ready() else 503)

    @api.get("/healthz")
    async def healthz() -> Response:
        """Report that the process is running."""
        return as_json({"status": "ok"})

    @api.get("/readyz")
    async def readyz(request: Request) -> Response:
        """Report whether the proxy can serve: there is a policy, and a vLLM that has the live versions. Only admins see
        more."""
        serves = ready()
        state = {
            "status": "ok" if serves else "unavailable",
            "vllm": any(one.healthy for one in replicas),
            "writer": recorder.writes,
            "database": recorder.away_since_s is None,
            "database_away_since": _instant(recorder.away_since_s),
            "unwritten": recorder.unwritten,
            "journal_bytes": recorder.journal_bytes,
            "journal_full": recorder.journal_full,
            "dropped": recorder.dropped,
            "waiting": replicas.waiting,
            "paused": replicas.pause_id is not None,
            "replicas": {one.url: {"state": one.state, "reason": one.reason} for one in replicas},
            "failing": dict(failing),
        }
        shown = state if is_admin(request.scope) else {"status": state["status"]}
        return as_json(shown, status=200 if serves else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """Report metrics in Prometheus' format."""
        share = await completeness.share()
        placed: Counter[str] = sum((one.placed for one in threads), Counter())
        own = [
            *records_of(recorder, data, traffic.sampled_tokens(), share, clock),
            *traffic_of(traffic, placed),
            *redaction_of(redactors),
            *servers_of(replicas),
            *spending_of(spending),
        ]

        from_tables = await reader.read(from_the_database) or []

        def text() -> bytes:
            return exposition([*own, *from_tables, *relabelled(completeness.server_texts)])

        # In a thread: the event loop serves the apps.
        return Response(await asyncio.to_thread(text), media_type=CONTENT_TYPE_LATEST)


def _instant(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
