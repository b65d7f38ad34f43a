"""vLLM, as the proxy reaches it: one edge, one translation of its errors. Knows HTTP; no chat."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from proxy.errors import UpstreamDown

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_S = 4.0
"""Idle connections are closed by us: vLLM closes them after 5 s, and a request on its way then would be lost."""


class Upstream:
    """A pool of connections to one vLLM."""

    def __init__(self, url: str, silence_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            # No limit: vLLM queues, and a request that waits here would be invisible to it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_timeout_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )

    @asynccontextmanager
    async def post(self, path: str, body: bytes, request_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give its response, headers read. Leaving early closes the connection: vLLM aborts.

        Raises:
            UpstreamDown: vLLM cannot be reached, hung up before its answer was whole, or was silent for too long.
        """
        headers = {"content-type": "application/json", "x-request-id": request_id}
        try:
            async with self._session.post(self._url + path, data=body, headers=headers) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise UpstreamDown(
                f"the model server does not answer ({type(error).__name__}); it may be starting, try again soon"
            ) from error

    async def healthy(self) -> bool:
        """Whether vLLM answers its health check."""
        try:
            async with self._session.get(self._url + "/health", timeout=aiohttp.ClientTimeout(total=2)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
