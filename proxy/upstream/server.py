"""Send requests to one upstream server: vLLM, or another OpenAI- or Anthropic-compatible one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVarTuple
from urllib.parse import urlsplit

import msgspec

from proxy.domain.policies import ServedVersion
from proxy.errors import ProxyError, UpstreamDown, UpstreamRefused
from proxy.http.client import Client
from proxy.http.client_response import Response, down

CONTROL_TIMEOUT_S = 2.0
"""Timeout of control requests, which are not requests of apps."""
MAX_CONTROL_BYTES = 64 * 2**20
"""Most bytes of an answer to a control request: the metrics of many adapters are some megabytes."""
DIALECT_HEADERS = (_VERSION, _BETA) = (b"anthropic-version", b"anthropic-beta")
"""Headers that define what a body means; some servers require them."""
Ts = TypeVarTuple("Ts")
_ENGINE_DEAD = b"EngineCore encountered an issue"
"""The text that vLLM (0.32) answers to every request once its engine has died."""


class Request(msgspec.Struct, frozen=True):
    """A request for an upstream server."""

    path: str
    body: bytes
    id: str
    """The request id that the server should use."""
    model: str
    """The model's name in the body: the name that the server uses."""
    trajectory_id: str
    """Requests of one trajectory share a prefix, which a server caches."""
    headers: Mapping[bytes, bytes] = {}
    """The app's headers, names in lower case; only those that define what the body means are passed on."""
    trace: Mapping[str, str] = {}
    """Headers of the trace that the server should continue."""
    meanwhile: Callable[[], object] | None = None
    """Work that may run while the server answers; it runs each time the request is sent, or never."""


class Answering(Protocol):
    """Where requests go: one server, or several equal servers."""

    def ask(self, asking: Callable[[*Ts], Request], *arguments: *Ts) -> Awaitable[Response]:
        """Send a request and return the response, headers read (`Upstream.ask`).

        `asking`, called with `arguments`, builds the request from the current state. It is called again after each
        wait.
        """
        ...


class Upstream:
    """Connections to one server: vLLM, or another one if there is a key."""

    def __init__(self, base_url: str, silence_timeout_s: float, api_key: str | None = None) -> None:
        """Create the connections. `base_url` is what clients use, `/v1` included."""
        self._base_path = urlsplit(base_url).path.rstrip("/")
        self._api_key = api_key
        self._client = Client(base_url, silence_timeout_s)
        # A client of its own: frequent control requests would keep all connections open that a burst of requests has
        # left.
        self._control = Client(base_url, silence_timeout_s)
        self._heads: dict[str, str] = {}
        """Start of the request head, by path."""

    def ask(self, asking: Callable[[*Ts], Request], *arguments: *Ts) -> Awaitable[Response]:
        """Send a request and return the response, headers read. Nothing waits here. Leaving the response early closes
        the connection, and vLLM aborts.

        A redirect is returned as an answer: following it would send the prompt, and a key in x-api-key, to the host
        that it names.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: the server closed the connection before its answer was whole, was silent for too long, or
                compresses its answer, which may expand to any size.
        """
        request = asking(*arguments)
        return self._client.send(self._head_of(request), request.body)

    def begin(self, request: Request) -> Response | None:
        """Send a request on an open connection; return the response, still empty. None: no connection is open."""
        return self._client.begin(self._head_of(request), request.body)

    def connect(self, request: Request) -> Awaitable[Response]:
        """Send a request on a new connection; return the response, still empty.

        Raises:
            NotReached: nothing was sent.
        """
        return self._client.connect(self._head_of(request), request.body)

    async def control(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Send a control request; return the status and the body of the answer.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: the server closed the connection, or took longer than `timeout_s`.
        """
        data = b"" if body is None else msgspec.json.encode(body)
        head = f"{self._head(method, path)}content-length: {len(data)}\r\n\r\n".encode("latin-1")
        try:
            async with asyncio.timeout(timeout_s):
                with await self._control.send(head, data, repeatable=method == "GET") as response:
                    return response.status, await response.read(MAX_CONTROL_BYTES)
        except TimeoutError as error:
            raise down(error) from error

    async def get(self, path: str) -> bytes | None:
        """Return the body of a GET request; None if the status is not 200."""
        try:
            status, answer = await self.control("GET", path)
        except UpstreamDown:
            return None
        return answer if status == 200 else None

    async def close(self) -> None:
        """Close every connection."""
        self._client.close()
        self._control.close()

    def _head_of(self, request: Request) -> bytes:
        head = self._heads.get(request.path)
        if head is None:
            head = self._heads[request.path] = self._head("POST", request.path) + "x-request-id: "
        headers, more = request.headers, ""
        if request.trace or _VERSION in headers or _BETA in headers:
            more = _more(request)
        return f"{head}{request.id}\r\n{more}content-length: {len(request.body)}\r\n\r\n".encode("latin-1")

    def _head(self, method: str, path: str) -> str:
        """Return a request's first line and its constant headers."""
        if path.startswith("/v1/"):
            path = self._base_path + path.removeprefix("/v1")
        else:
            path = self._base_path.removesuffix("/v1") + path
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._client.host}", "content-type: application/json"]
        if self._api_key and path.endswith("/messages"):
            lines.append(f"x-api-key: {self._api_key}")
        elif self._api_key:
            lines.append(f"authorization: Bearer {self._api_key}")
        return "".join(f"{line}\r\n" for line in lines)


def _more(request: Request) -> str:
    """Return the headers that only some requests have: the app's headers that are passed on, then the trace's."""
    headers = request.headers
    passed_on = [(name.decode(), headers[name].decode("latin-1")) for name in DIALECT_HEADERS if name in headers]
    return "".join(f"{name}: {value}\r\n" for name, value in (*passed_on, *request.trace.items()))


def why(error: UpstreamDown) -> str:
    """Return what happened, for the operator of the server."""
    return str(error.__cause__ or error) or type(error.__cause__).__name__


def lacks_model(status: int, body: bytes, model: str) -> bool:
    """Return whether vLLM answered that it has no model of that name."""
    return status == 404 and model.encode() in body


def engine_died(status: int, body: bytes) -> bool:
    """Return whether vLLM answered that its engine is dead."""
    return status == 500 and _ENGINE_DEAD in body


def refusal(response: Response, body: bytes, speaker: ServedVersion) -> ProxyError | None:
    """Return our own error for an answer that would mislead the app; None if the answer is passed on unchanged."""
    if speaker.upstream is not None and response.status in (401, 403):
        return UpstreamRefused(
            f"the server {speaker.upstream!r} did not take this proxy's key ({response.status}); "
            f"check upstreams.{speaker.upstream}.api_key_env",
        )
    if speaker.upstream is None and engine_died(response.status, body):
        return UpstreamDown("the model server's engine has stopped and is being restarted; try again soon")
    return None
