"""The proxy put together: one ASGI app for uvicorn. Inference is raw ASGI in front of FastAPI for the rest."""

import asyncio
import gc
import logging

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from migrations.database import connect
from proxy import api, guard
from proxy.errors import ProxyError
from proxy.inference import Inference, Receive, Scope, Send
from proxy.policies import Policy
from proxy.recorder import Recorder
from proxy.store import Store
from proxy.upstream import Upstream
from whetstone.broker import celery_app, hint
from whetstone.settings import Settings, load
from whetstone.tasks import ASSEMBLE

log = logging.getLogger(__name__)


class Proxy:
    """The app. Parts that need the event loop are made at start-up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policies: dict[str, Policy] = {}

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
            if scope["method"] == "POST" and scope["path"] == "/v1/chat/completions":
                await self._inference(scope, receive, send)
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
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self) -> None:
        settings = self._settings
        if settings.vllm.url is None:
            raise RuntimeError("the proxy needs vLLM's address: setting vllm.url")
        celery = celery_app("proxy", settings)
        self._store = Store(connect(settings.database_url))
        self._upstream = Upstream(settings.vllm.url, settings.proxy.upstream_timeout_s)
        self._recorder = Recorder(self._store, settings.data / "journal", on_feedback=lambda: hint(celery, ASSEMBLE))
        self._recorder.start()
        self._policies = self._store.policies(settings.project)
        self._refreshing = asyncio.ensure_future(self._refresh())
        self._inference = Inference(
            settings.project, self._known, self._upstream, self._recorder, settings.proxy.max_body_bytes
        )
        self._api: FastAPI = api.build(
            project=settings.project,
            policies=self._known,
            store=self._store,
            recorder=self._recorder,
            upstream=self._upstream,
            max_body_bytes=settings.proxy.max_body_bytes,
        )
        # What start-up made stays; without this every full collection walks all of it.
        gc.collect()
        gc.freeze()

    async def _stop(self) -> None:
        self._refreshing.cancel()
        await self._recorder.close()
        await self._upstream.close()
        self._store.close()

    def _known(self) -> dict[str, Policy]:
        return self._policies

    async def _refresh(self) -> None:
        """Keep the policies as the database tells them; while it is away the last ones stay."""
        away = False
        while True:
            await asyncio.sleep(self._settings.proxy.refresh_s)
            try:
                self._policies = await asyncio.to_thread(self._store.policies, self._settings.project)
                away = False
            except SQLAlchemyError as error:
                if not away:
                    log.warning("the policies cannot be read, the last ones stay: %s", error)
                away = True


def create() -> Proxy:
    """What uvicorn calls: `uvicorn --factory proxy.app:create`. Settings come from file and environment."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return Proxy(load())
