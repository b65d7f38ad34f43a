"""How the whole proxy is: /healthz, /readyz, /metrics, over all projects. Reads; knows no key and no request."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from proxy.completeness import Completeness
from proxy.keys import is_admin
from proxy.metrics import exposition, records_of, redaction_of, servers_of
from proxy.policies import Policy
from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.replicas import Replicas
from proxy.responses import as_json
from proxy.store import Store
from proxy.store_steps import StepTables
from proxy.threads import Threads
from whetstone.ids import version_id

PATHS = frozenset({"/healthz", "/readyz", "/metrics"})


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
) -> None:
    """Add the routes of PATHS to `api`; `policies`, `threads` and `redactors` are those of all projects."""
    step_tables = [StepTables(store.engine, project) for project in projects]

    @api.get("/healthz")
    async def healthz() -> Response:
        """The process lives."""
        return as_json({"status": "ok"})

    @api.get("/readyz")
    async def readyz(request: Request) -> Response:
        """It can serve: there is a policy, and a vLLM that has the live versions. More is told to admins alone."""
        live = [version_id(policy.name, policy.live_version) for policy in policies() if policy.upstream is None]
        ready = bool(live) and replicas.ready(live)
        servers = {one.url: {"state": one.state, "reason": one.reason} for one in replicas}
        state = {
            "status": "ok" if ready else "unavailable",
            "vllm": any(one.healthy for one in replicas),
            "database": recorder.away_since_s is None,
            "database_away_since": _instant(recorder.away_since_s),
            "unwritten": recorder.unwritten,
            "journal_bytes": recorder.journal_bytes,
            "dropped": recorder.dropped,
            "waiting": replicas.waiting,
            "paused": replicas.held_by is not None,
            "replicas": servers,
        }
        told = state if is_admin(request.scope) else {"status": state["status"]}
        return as_json(told, status=200 if ready else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        try:
            reasons = await asyncio.to_thread(store.reasons, projects, datetime.now(UTC) - timedelta(hours=1))
            steps = [of_one for tables in step_tables for of_one in await asyncio.to_thread(tables.read)]
        except SQLAlchemyError:
            reasons, steps = None, None
        share = await completeness.share()
        placed: Counter[str] = sum((one.placed for one in threads), Counter())
        others = [*records_of(recorder), *servers_of(replicas), *redaction_of(redactors)]
        text = exposition(recorder.unwritten, completeness.written, share, placed, reasons, steps, others)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _instant(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
