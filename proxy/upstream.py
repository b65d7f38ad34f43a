"""A server that answers, as the proxy reaches it: one edge, one translation of its errors. Knows HTTP; no dialect."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from proxy.errors import AdapterLoading, ProxyError, UpstreamDown, UpstreamRefused
from proxy.policies import Speaker

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Idle connections are closed by us: vLLM closes them after 5 s, and a request on its way then would be lost."""
DIALECT_HEADERS = (b"anthropic-version", b"anthropic-beta")
"""Headers that say what a body means; other servers ask for them."""
_ENGINE_DEAD = b"EngineCore encountered an issue"
"""What vLLM (0.32) answers to everybody once its engine has died."""


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Upstream:
    """A pool of connections to one server: vLLM, or with a key another one."""

    def __init__(self, base_url: str, silence_timeout_s: float, api_key: str | None = None) -> None:
        """`base_url` as clients write it, `/v1` included."""
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._session = aiohttp.ClientSession(
            # No limit: vLLM queues, and a request that waits here would be invisible to it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # What a server says to one app is not told it again by another.
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, request_id: str, asked: Mapping[bytes, bytes]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give its response, headers read. Leaving early closes the connection: vLLM aborts.

        Of the app's headers (`asked`, names in lower case) only those pass that say what the body means.

        Raises:
            UpstreamDown: it cannot be reached, hung up before its answer was whole, or was silent for too long.
        """
        headers = {"content-type": "application/json", "x-request-id": request_id}
        headers |= {name.decode(): asked[name].decode("latin-1") for name in DIALECT_HEADERS if name in asked}
        if self._api_key and path == "/v1/messages":
            headers["x-api-key"] = self._api_key
        elif self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            # A redirect would take the prompt, and a key in x-api-key, to whatever host it names.
            async with self._session.post(
                self._address(path), data=body, headers=headers, allow_redirects=False
            ) as response:
                yield response
                if response.status >= 500:
                    # vLLM's server closes such a connection without saying so: nobody's request may go that way.
                    response.close()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise UpstreamDown(
                f"the model server does not answer ({type(error).__name__}); it may be starting, try again soon"
            ) from error

    async def get(self, path: str, timeout_s: float = 2.0) -> bytes | None:
        """What it answers to a read; None where it does not answer with 200."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(self._address(path), timeout=timeout) as response:
                return await response.read() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return None

    async def max_model_len(self) -> int | None:
        """Tokens that prompt and answer may have together; None where it does not tell."""
        told = await self.get("/v1/models")
        try:
            return None if told is None else _models.decode(told).data[0].max_model_len
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
            return None

    async def healthy(self) -> bool:
        """Whether vLLM answers its health check."""
        return await self.get("/health") is not None

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def _address(self, path: str) -> str:
        if path.startswith("/v1/"):
            return self._base_url + path.removeprefix("/v1")
        return self._base_url.removesuffix("/v1") + path


def refusal(response: aiohttp.ClientResponse, body: bytes, speaker: Speaker) -> ProxyError | None:
    """The error of ours for an answer that would mislead the app; None where it is passed on as it is."""
    if speaker.upstream is not None:
        if response.status in (401, 403):
            return UpstreamRefused(
                f"the server {speaker.upstream!r} did not take this proxy's key ({response.status}); "
                f"check upstreams.{speaker.upstream}.api_key_env",
            )
        return None
    if response.status == 404 and speaker.served_name.encode() in body:
        return AdapterLoading(f"version {speaker.version} of {speaker.policy!r} is being loaded again; try again soon")
    if response.status == 500 and _ENGINE_DEAD in body:
        return UpstreamDown("the model server's engine has stopped and is being restarted; try again soon")
    return None
