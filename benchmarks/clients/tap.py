"""Count what passes between a client and the proxy: a reverse proxy on loopback that changes nothing and keeps bodies.

It is the independent ledger of a run: what it has and SQL has not was not recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from proxy.domain.address import RECORDED, split_url

CONNECTION = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
"""Headers of a single connection, which each side sets itself."""
MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TappedCall:
    """A request that samples, and the head of its answer. None: it has no such field."""

    path: str
    headers: Mapping[str, str]
    """Of the request; names in lower case."""
    body: bytes
    status: int
    completion_id: str | None
    error: str | None
    """The answer, if it is an error."""


class Tap:
    """Passes requests on to one server; `start` returns its own address."""

    def __init__(self, upstream: str) -> None:
        self.calls: list[TappedCall] = []
        self._upstream = upstream

    async def start(self) -> str:
        """Listen on a free port."""
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in CONNECTION}
        url = self._upstream + request.path_qs
        async with self._session.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as answer:
            path = split_url(request.path)[1] if request.path.startswith("/r/") else request.path
            samples = request.method == "POST" and path in RECORDED
            error = (await answer.read()).decode(errors="replace") if samples and answer.status >= 400 else None
            if samples:
                lower = {name.lower(): value for name, value in headers.items()}
                completion_id = answer.headers.get("x-completion-id")
                self.calls.append(TappedCall(path, lower, body, answer.status, completion_id, error))
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in CONNECTION:
                    response.headers.add(name, value)
            response.content_length = answer.content_length
            await response.prepare(request)
            if error is not None:
                await response.write(error.encode())
            async for data in answer.content.iter_any():
                await response.write(data)
            return response
