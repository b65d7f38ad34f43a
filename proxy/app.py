"""Build the proxy as one ASGI app for uvicorn: what all projects share is made here, the rest in `project`."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from proxy.admission.api_key_store import KeyTables
from proxy.admission.api_keys import Keys
from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.admission.middleware import AdmissionMiddleware, ConcurrencyLimit
from proxy.admission.rate_limits import RateLimiter
from proxy.admission.token_secrets import read_secrets
from proxy.api import health
from proxy.dashboard.middleware import DashboardDoor
from proxy.dashboard.queries.sessions import SessionTables
from proxy.domain.call import Call
from proxy.domain.feedback_rows import ended_by
from proxy.http.asgi import Receive, Routes, Scope, Send
from proxy.metrics.traffic import Traffic
from proxy.metrics.vllm import Completeness
from proxy.project import Tenant
from proxy.recording.recorder import Recorder
from proxy.recording.store import Store
from proxy.recording.writer import AWAY
from proxy.supervision import Background
from proxy.trajectories.peers import Peers
from proxy.trajectories.store import ThreadTables
from proxy.tuning import tune_collector
from proxy.upstream.device_pause import Pauses
from proxy.upstream.load_balancer import Replica, Replicas
from proxy.upstream.reconciler import Reconciler
from proxy.upstream.replica_store import ReplicaTables
from proxy.upstream.server import Upstream
from proxy.upstream.spending import READ_EVERY_S, SpendingCap
from whetstone.config.proxy import UpstreamSettings
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.messaging.celery_app import celery_app, hint
from whetstone.messaging.task_names import ASSEMBLE, STEP
from whetstone.registry.api_key_store import ensure_bootstrap
from whetstone.registry.remote.sources import source_of

DASHBOARD_AT_ONCE = 64
"""Most forms of the dashboard in flight."""
THREADS = 32
"""Most database lookups, file reads and similar work at once."""

log = logging.getLogger(__name__)


class Proxy:
    """The ASGI app. Parts that need the event loop are made at start-up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.tenants: dict[str, Tenant] = {}
        self._opened = AsyncExitStack()
        self._background = Background()
        self._recorder: Recorder | None = None

    @property
    def broken(self) -> bool:
        """Return whether the proxy must be stopped: only a restart helps."""
        return self._recorder is not None and not self._recorder.writes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            return self._door.serve(scope, receive, send)
        if scope["type"] == "lifespan":
            return self._lifespan(receive, send)
        return send({"type": "websocket.close", "code": 1000})

    def _route(self, project: str, method: str, path: str) -> Routes:
        """Return what serves such a request of the project."""
        tenant = self.tenants[project]
        return tenant.posts.get(path, tenant.api) if method == "POST" else tenant.api

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._start()
        except Exception as error:
            message = str(error)
            if isinstance(error, AWAY):
                message = f"the database does not answer, and the policies stand in it: start it first ({error})"
            else:
                log.exception("the proxy cannot start")
            await self._opened.aclose()
            await send({"type": "lifespan.startup.failed", "message": message})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._opened.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        settings = self._settings
        # More threads than Python's default: a request's lookup must not queue behind writes that wait.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        if not settings.vllm.urls:
            raise RuntimeError("the proxy needs vLLM's address: setting vllm.urls")
        celery = celery_app("proxy", settings)
        store = Store(connect(settings.database_url))
        self._opened.callback(store.close)
        vllm = {url: Upstream(url.rstrip("/") + "/v1", settings.proxy.upstream_timeout_s) for url in settings.vllm.urls}
        others = _others(settings)
        for upstream in (*vllm.values(), *others.values()):
            self._opened.push_async_callback(upstream.close)
        of_projects = settings.of_projects()
        projects = [own.project for own in of_projects]
        traffic = Traffic()
        completeness = Completeness(vllm, store, projects, traffic.sampled_tokens)
        self._replicas = Replicas(
            [Replica(url, upstream) for url, upstream in vllm.items()],
            settings.proxy.max_waiting,
            settings.proxy.max_wait_s,
        )

        recorder = Recorder(
            store,
            settings.data / "journal",
            on_feedback=lambda: hint(celery, ASSEMBLE),
            on_written=traffic.note,
            on_recovered=self._recovered,
            on_feedback_recovered=self._feedback_recovered,
            settings=settings.proxy,
            background=self._background,
        )
        # Other proxies wait for the calls of one project, but the calls of all projects are written in one queue.
        self._peers = Peers(ThreadTables(store.engine, settings.project, store.changes), lambda: recorder.written_until)
        self._keys = Keys(
            KeyTables(store.engine, projects, store.changes),
            settings.project,
            on_loopback=settings.proxy.on_loopback,
        )
        secrets = await asyncio.to_thread(read_secrets, settings.data, os.environ)
        tokens = FeedbackTokens(secrets, settings.proxy.feedback_token_lifetime_s)
        limiter = RateLimiter(lambda: self._peers.others)
        await completeness.share()  # exclude what vLLM has sampled until now
        await asyncio.to_thread(ensure_bootstrap, store.engine, settings)
        await self._keys.refresh()
        spending = SpendingCap(store.engine, settings)
        if spending.is_counted:
            await spending.refresh()
        self.tenants = {
            own.project: Tenant(
                own,
                store=store,
                recorder=recorder,
                replicas=self._replicas,
                upstreams={None: self._replicas, **others},
                peers=self._peers,
                quiet_since_s=self._quiet_since_s,
                on_step_requested=lambda: hint(celery, STEP),
                keys_changed=self._keys.refresh,
                charge=limiter.charge_tokens,
                tokens=tokens,
                spending=spending,
            )
            for own in of_projects
        }
        tenants = self.tenants.values()
        self._door = AdmissionMiddleware(
            self._keys,
            tokens,
            limiter,
            ConcurrencyLimit(settings.proxy),
            settings.project,
            settings.proxy.cors_origins,
            self._route,
            DashboardDoor(
                self._keys,
                SessionTables(store.engine),
                recorder.commit,
                # A limit of its own: visitors who have not signed in must not keep apps out.
                ConcurrencyLimit(settings.proxy.model_copy(update={"max_in_flight": DASHBOARD_AT_ONCE})),
                settings.project,
                lambda name: self.tenants[name].dashboard,
            ),
        )
        recorder.start()
        self._recorder = recorder
        self._opened.push_async_callback(recorder.close)
        await self._peers.refresh()
        for tenant in tenants:  # recovery may have taken long
            await tenant.read_again()
        self._opened.push_async_callback(self._leave)
        for tenant in tenants:
            self._opened.push_async_callback(tenant.comparisons.close)
        await self._look_after_servers(ReplicaTables(store.engine, settings.project, projects, store.changes))
        health.add(
            self.tenants[settings.project].api,
            projects=projects,
            policies=lambda: [policy for tenant in tenants for policy in tenant.policies],
            threads=[tenant.threads for tenant in tenants],
            redactors=[tenant.redactor for tenant in tenants if tenant.redactor is not None],
            store=store,
            recorder=recorder,
            replicas=self._replicas,
            completeness=completeness,
            traffic=traffic,
            data=settings.data,
            failing=self._background.failing,
            spending=spending,
        )
        if spending.is_counted:
            reading = self._background.every(READ_EVERY_S, "sum of the day's costs", spending.refresh)
            self._opened.callback(reading.cancel)
        refreshing = self._background.every(settings.proxy.refresh_s, "refresh of keys and policies", self._refresh)
        for task in (refreshing, *(task for tenant in tenants for task in tenant.start(self._background))):
            self._opened.callback(task.cancel)
        tune_collector()

    def _quiet_since_s(self) -> float | None:
        ended = [tenant.inference.quiet_since_s for tenant in self.tenants.values()]
        return None if None in ended else max(one for one in ended if one is not None)

    def _recovered(self, call: Call) -> None:
        # A call of a project that is no longer in the settings is written to SQL, but no call can continue it.
        if tenant := self.tenants.get(call.project):
            tenant.threads.recovered(call)

    def _feedback_recovered(self, row: Mapping[str, Any]) -> None:
        if tenant := self.tenants.get(row["project"]):
            for name in ended_by(row):
                tenant.threads.ended(name)

    async def _look_after_servers(self, tables: ReplicaTables) -> None:
        """Check vLLM's servers, and whether a step has their accelerator, before the first request."""
        settings = self._settings
        self._pauses = Pauses(tables, self._replicas, self._peers.id, settings.vllm.shares_device)
        await self._pauses.refresh()
        await asyncio.to_thread(tables.forget_replicas, settings.vllm.urls)
        source = source_of(settings.data, settings.adapters)
        reconcilers = [
            Reconciler(
                one,
                self._replicas,
                tables,
                settings.all_trained,
                settings.proxy.drain_s,
                settings.vllm.shares_device,
                source,
            )
            for one in self._replicas
        ]
        await asyncio.gather(*(one.look() for one in reconcilers))
        for one in reconcilers:
            for task in one.start(self._background):
                self._opened.callback(task.cancel)

    async def _leave(self) -> None:
        with suppress(SQLAlchemyError):  # otherwise the other proxies wait until this one has been silent long enough
            await self._peers.leave()

    async def _refresh(self) -> None:
        """Read keys and policies once; while the database cannot be reached, those read last stay in force."""
        # Keys come first: a revoked key must stop working, even if a later read fails.
        await self._keys.refresh()
        await self._pauses.refresh()
        for tenant in self.tenants.values():
            await tenant.read_again(patient=True)
        await self._peers.refresh()


def _others(settings: Settings) -> dict[str | None, Upstream]:
    """Return the upstream servers other than vLLM, by name, with their keys from the environment."""
    return {
        name: Upstream(server.url, settings.proxy.upstream_timeout_s, _key(name, server))
        for name, server in settings.upstreams.items()
    }


def _key(name: str, server: UpstreamSettings) -> str | None:
    if server.api_key_env is None:
        return None
    if key := os.environ.get(server.api_key_env, "").strip():
        if not (key.isascii() and key.isprintable()):
            raise RuntimeError(f"upstreams.{name}: {server.api_key_env} is no key: it has what no header may have")
        return key
    raise RuntimeError(f"upstreams.{name}: the environment has no {server.api_key_env}")
