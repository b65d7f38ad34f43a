"""The proxy put together: one ASGI app for uvicorn. Inference is raw ASGI in front of FastAPI for the rest."""

import asyncio
import gc
import logging
import os
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from migrations.database import connect
from proxy import admin, api, guard, passed
from proxy.address import split_url
from proxy.asgi import Receive, Scope, Send
from proxy.completeness import Completeness
from proxy.errors import DatabaseAway, NotFound, ProxyError
from proxy.inference import SAID, Inference
from proxy.passed import Passed
from proxy.peers import Peers
from proxy.policies import Policies, Policy
from proxy.recorder import Recorder
from proxy.replays import Replays
from proxy.shadows import Shadows
from proxy.store import Store
from proxy.store_shadows import ShadowTables
from proxy.store_threads import ThreadTables
from proxy.threads import Threads
from proxy.upstream import Upstream
from proxy.wire import dialects
from proxy.wire.dialect import Server
from whetstone.broker import celery_app, hint
from whetstone.settings import Settings, UpstreamSettings, load
from whetstone.tasks import ASSEMBLE, STEP

LEARN_EVERY_S = 1.0
SHADOWS_LATE = timedelta(hours=1)
"""What ended so long before the start may still get shadow siblings."""

log = logging.getLogger(__name__)


class Proxy:
    """The app. Parts that need the event loop are made at start-up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policies = Policies()
        self._vllm = Server()
        self._opened = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            guard.check(dict(scope["headers"]))
            if "\0" in scope["path"] and scope["method"] in ("GET", "DELETE"):
                raise NotFound("no path has a NUL")  # nor has a text of PostgreSQL's
            if scope["path"].startswith("/r/"):
                scope[SAID], scope["path"] = split_url(scope["path"])
                scope["raw_path"] = scope["path"].encode()
            if scope["method"] == "POST" and scope["path"] in dialects.PATHS:
                await self._inference(scope, receive, send)
            elif scope["method"] == "POST" and scope["path"] in passed.PATHS:
                await self._passed(scope, receive, send)
            else:
                await self._api(scope, receive, send)
        except ProxyError as error:
            await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
            await send({"type": "http.response.body", "body": error.body()})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self._start()
        except Exception as error:
            log.exception("the proxy cannot start")
            await self._opened.aclose()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._opened.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        settings = self._settings
        if settings.vllm.url is None:
            raise RuntimeError("the proxy needs vLLM's address: setting vllm.url")
        celery = celery_app("proxy", settings)
        self._store = Store(connect(settings.database_url))
        self._opened.callback(self._store.close)
        self._upstreams = _upstreams(settings.vllm.url, settings)
        for upstream in self._upstreams.values():
            self._opened.push_async_callback(upstream.close)
        self._completeness = Completeness(self._upstreams[None], self._store, settings.project)
        tables = ThreadTables(self._store.engine, settings.project)
        self._peers = Peers(tables, lambda: self._recorder.written_until)
        self._threads = Threads(tables, self._peers, settings.groups.idle_s)
        self._recorder = Recorder(
            self._store,
            settings.data / "journal",
            on_feedback=lambda: hint(celery, ASSEMBLE),
            on_written=self._completeness.note,
            on_recovered=self._threads.recovered,
        )
        await self._completeness.begin()
        self._recorder.start()
        self._opened.push_async_callback(self._recorder.close)
        self._policies = self._read_policies()
        await self._peers.refresh()
        self._opened.push_async_callback(self._leave)
        await self._learn()
        for task in (self._refresh(), self._learn_more()):
            self._opened.callback(asyncio.ensure_future(task).cancel)
        answered = Replays(self._reply)
        self._inference = Inference(
            settings.project,
            self._known,
            self._upstreams,
            lambda: self._vllm,
            self._recorder,
            answered,
            self._threads,
            settings.proxy,
        )
        shadows = Shadows(
            settings.project,
            ShadowTables(self._store.engine, settings.project),
            self._known,
            self._upstreams[None],
            lambda: self._vllm.max_model_len,
            lambda: self._inference.quiet_since_s,
            self._recorder.record,
            settings.learning,
        )
        drawing = asyncio.ensure_future(shadows.run(datetime.now(UTC) - SHADOWS_LATE))
        self._opened.callback(drawing.cancel)
        self._passed = Passed(self._known, self._upstreams, settings.proxy)
        self._api: FastAPI = api.build(
            project=settings.project,
            policies=self._known,
            store=self._store,
            recorder=self._recorder,
            vllm=self._upstreams[None],
            completeness=self._completeness,
            threads=self._threads,
            judges=frozenset(settings.judges),
            settings=settings.proxy,
        )
        admin.add(
            self._api,
            project=settings.project,
            policies=self._known,
            recorder=self._recorder,
            on_step_asked=lambda: hint(celery, STEP),
            settings=settings.proxy,
        )
        # What start-up made stays; without this every full collection walks all of it.
        gc.collect()
        gc.freeze()

    def _known(self) -> Policies:
        return self._policies

    def _read_policies(self) -> Policies:
        """Those that the settings name: what else the database has, nobody here serves."""
        return Policies(
            policy for policy in self._store.policies(self._settings.project) if _served(policy, self._settings)
        )

    async def _reply(self, turn_key: str) -> bytes | None:
        try:
            return await asyncio.to_thread(self._store.reply, self._settings.project, turn_key)
        except SQLAlchemyError as error:
            raise DatabaseAway(
                "whether this turn was answered before stands in the database: try again soon"
            ) from error

    async def _learn(self) -> None:
        self._vllm = Server(max_model_len=await self._upstreams[None].max_model_len())

    async def _learn_more(self) -> None:
        """Ask until vLLM has told what it is; it may be starting."""
        while self._vllm.max_model_len is None:
            await asyncio.sleep(LEARN_EVERY_S)
            await self._learn()

    async def _leave(self) -> None:
        with suppress(SQLAlchemyError):  # then the others wait until it is gone long enough
            await self._peers.leave()

    async def _refresh(self) -> None:
        """Keep the policies as the database tells them; while it is away the last ones stay."""
        away = False
        while True:
            await asyncio.sleep(self._settings.proxy.refresh_s)
            try:
                self._policies = await asyncio.to_thread(self._read_policies)
                await self._peers.refresh()
                away = False
            except Exception as error:  # whatever it is: without this task nothing would go live any more
                if not away:
                    log.warning("the policies cannot be read, the last ones stay: %s", error)
                away = True


def _upstreams(vllm_url: str, settings: Settings) -> dict[str | None, Upstream]:
    """vLLM under None, the other servers by name, their keys from the environment."""
    timeout_s = settings.proxy.upstream_timeout_s
    keys = {name: _key(name, server) for name, server in settings.upstreams.items()}
    upstreams: dict[str | None, Upstream] = {None: Upstream(vllm_url.rstrip("/") + "/v1", timeout_s)}
    return upstreams | {
        name: Upstream(server.url, timeout_s, keys[name]) for name, server in settings.upstreams.items()
    }


def _key(name: str, server: UpstreamSettings) -> str | None:
    if server.api_key_env is None:
        return None
    if key := os.environ.get(server.api_key_env):
        return key
    raise RuntimeError(f"upstreams.{name}: the environment has no {server.api_key_env}")


def _served(policy: Policy, settings: Settings) -> bool:
    if policy.upstream is None:
        return policy.name in settings.trained
    server = settings.upstreams.get(policy.upstream)
    return server is not None and policy.name in server.models


def create() -> Proxy:
    """What uvicorn calls: `uvicorn --factory proxy.app:create`. Settings come from file and environment."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return Proxy(load())
