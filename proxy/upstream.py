"""A server that answers, as the proxy reaches it: one edge, one translation of its errors. Knows HTTP; no dialect."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import aiohttp
import msgspec

from proxy.errors import NotReached, ProxyError, UpstreamDown, UpstreamRefused
from proxy.policies import Speaker

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Idle connections are closed by us: vLLM closes them after 5 s, and a request on its way then would be lost."""
CONTROL_TIMEOUT_S = 2.0
"""Of what is asked beside the requests of apps."""
DIALECT_HEADERS = (b"anthropic-version", b"anthropic-beta")
"""Headers that say what a body means; other servers ask for them."""
_ENGINE_DEAD = b"EngineCore encountered an issue"
"""What vLLM (0.32) answers to everybody once its engine has died."""
_NOTHING_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BROKEN = (aiohttp.ClientError, TimeoutError, ConnectionError)


class Request(msgspec.Struct, frozen=True):
    """What a server is to answer."""

    path: str
    body: bytes
    id: str
    """What the server is to call it."""
    model: str
    """The name in its body: what the server calls the model."""
    trajectory_id: str
    """Requests of one trajectory share their beginning, which a server keeps."""
    headers: Mapping[bytes, bytes] = {}
    """The app's, names in lower case; only those pass that say what the body means."""
    trace: Mapping[str, str] = {}
    """Headers of the trace that the server is to go on with."""


class Answering(Protocol):
    """Where requests go: one server, or several that are alike."""

    def post(self, asking: Callable[[], Request]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request and give its response, headers read (`Upstream.send`).

        `asking` says what is to be asked as things stand, and is asked again after each wait.
        """
        ...


class Upstream:
    """Pools of connections to one server: vLLM, or with a key another one."""

    def __init__(self, base_url: str, silence_timeout_s: float, api_key: str | None = None) -> None:
        """`base_url` as clients write it, `/v1` included."""
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._session = _session(silence_timeout_s)
        # Of its own: what is asked all the time would keep every connection open that a rush of requests has left.
        self._control = _session(silence_timeout_s)

    def post(self, asking: Callable[[], Request]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request and give its response, headers read (`send`). Nothing waits here."""
        return self.send(asking())

    @asynccontextmanager
    async def send(self, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give its response, headers read. Leaving early closes the connection: vLLM aborts.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: it hung up before its answer was whole, was silent for too long, or compresses its answer,
                to whatever size.
        """
        headers = {"content-type": "application/json", "x-request-id": request.id}
        asked = request.headers
        headers |= {name.decode(): asked[name].decode("latin-1") for name in DIALECT_HEADERS if name in asked}
        headers |= request.trace
        if self._api_key and request.path == "/v1/messages":
            headers["x-api-key"] = self._api_key
        elif self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            # A redirect would take the prompt, and a key in x-api-key, to whatever host it names.
            async with self._session.post(
                self._address(request.path), data=request.body, headers=headers, allow_redirects=False
            ) as response:
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise UpstreamDown("the model server compresses its answers, unasked; have it send them plain")
                yield response
                if response.status >= 500:
                    # vLLM's server closes such a connection without saying so: nobody's request may go that way.
                    response.close()
        except _BROKEN as error:
            raise _down(error) from error

    async def control(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Ask for something of our own; its status and what it says.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: it hung up, or took longer than `timeout_s`.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_TIMEOUT_S))
        address = self._address(path)
        try:
            async with self._control.request(
                method, address, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except _BROKEN as error:
            raise _down(error) from error

    async def get(self, path: str) -> bytes | None:
        """What it answers to a read; None where it does not answer with 200."""
        try:
            status, told = await self.control("GET", path)
        except UpstreamDown:
            return None
        return told if status == 200 else None

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._control.close()

    def _address(self, path: str) -> str:
        if path.startswith("/v1/"):
            return self._base_url + path.removeprefix("/v1")
        return self._base_url.removesuffix("/v1") + path


def _session(silence_timeout_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # No limit: vLLM queues, and a request that waits here would be invisible to it.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        # What a server says to one app is not told it again by another.
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


def _down(error: Exception) -> UpstreamDown:
    kind = NotReached if isinstance(error, _NOTHING_SENT) else UpstreamDown
    return kind(f"the model server does not answer ({type(error).__name__}); it may be starting, try again soon")


async def whole(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """An answer in one piece.

    Raises:
        UpstreamDown: it has more than `most_bytes`.
    """
    if response.content.at_eof():
        return await response.read()  # or somebody has read it before
    parts: list[bytes] = []
    size = 0
    async for data in response.content.iter_any():
        size += len(data)
        if size > most_bytes:
            raise too_long(most_bytes)
        parts.append(data)
    return b"".join(parts)


def too_long(most_bytes: int) -> UpstreamDown:
    """The error for an answer that does not end."""
    return UpstreamDown(f"the model server's answer is over {most_bytes} bytes (setting proxy.max_answer_bytes)")


def why(down: UpstreamDown) -> str:
    """What happened, for whoever runs the server."""
    return str(down.__cause__ or down) or type(down.__cause__).__name__


def lacks_model(status: int, body: bytes, model: str) -> bool:
    """Whether vLLM answered that it has no model of that name."""
    return status == 404 and model.encode() in body


def engine_died(status: int, body: bytes) -> bool:
    """Whether vLLM answered that its engine is dead."""
    return status == 500 and _ENGINE_DEAD in body


def refusal(response: aiohttp.ClientResponse, body: bytes, speaker: Speaker) -> ProxyError | None:
    """The error of ours for an answer that would mislead the app; None where it is passed on as it is."""
    if speaker.upstream is not None:
        if response.status in (401, 403):
            return UpstreamRefused(
                f"the server {speaker.upstream!r} did not take this proxy's key ({response.status}); "
                f"check upstreams.{speaker.upstream}.api_key_env",
            )
        return None
    if engine_died(response.status, body):
        return UpstreamDown("the model server's engine has stopped and is being restarted; try again soon")
    return None
