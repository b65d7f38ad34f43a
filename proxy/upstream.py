"""A server that answers, as the proxy reaches it. Knows HTTP's headers; no dialect, no socket."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVarTuple
from urllib.parse import urlsplit

import msgspec

from proxy.client import Client
from proxy.client_response import Response, down
from proxy.errors import ProxyError, UpstreamDown, UpstreamRefused
from proxy.policies import Speaker

CONTROL_TIMEOUT_S = 2.0
"""Of what is asked beside the requests of apps."""
MAX_CONTROL_BYTES = 64 * 2**20
"""Of an answer to that: metrics of many adapters are some megabytes."""
DIALECT_HEADERS = (_VERSION, _BETA) = (b"anthropic-version", b"anthropic-beta")
"""Headers that say what a body means; other servers ask for them."""
Ts = TypeVarTuple("Ts")
_ENGINE_DEAD = b"EngineCore encountered an issue"
"""What vLLM (0.32) answers to everybody once its engine has died."""


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
    meanwhile: Callable[[], None] | None = None
    """What may be done while the server works; done again each time it is sent, or never."""


class Answering(Protocol):
    """Where requests go: one server, or several that are alike."""

    def ask(self, asking: Callable[[*Ts], Request], *told: *Ts) -> Awaitable[Response]:
        """Send a request and give its response, headers read (`Upstream.send`).

        `asking`, with what it is `told`, says what is to be asked as things stand, and is asked again after each wait.
        """
        ...


class Upstream:
    """Connections to one server: vLLM, or with a key another one."""

    def __init__(self, base_url: str, silence_timeout_s: float, api_key: str | None = None) -> None:
        """`base_url` as clients write it, `/v1` included."""
        self._base_path = urlsplit(base_url).path.rstrip("/")
        self._api_key = api_key
        self._client = Client(base_url, silence_timeout_s)
        # Of its own: what is asked all the time would keep every connection open that a rush of requests has left.
        self._control = Client(base_url, silence_timeout_s)
        self._heads: dict[str, str] = {}
        """By path: how each of its requests begins."""

    def ask(self, asking: Callable[[*Ts], Request], *told: *Ts) -> Awaitable[Response]:
        """Send a request and give its response, headers read (`send`). Nothing waits here."""
        return self.send(asking(*told))

    def send(self, request: Request) -> Awaitable[Response]:
        """Send a request and give its response, headers read. Leaving that early closes the connection: vLLM aborts.

        A redirect is an answer: followed, it would take the prompt, and a key in x-api-key, to whatever host it names.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: it hung up before its answer was whole, was silent for too long, or compresses its answer,
                to whatever size.
        """
        return self._client.send(self._head_of(request), request.body)

    def begin(self, request: Request) -> Response | None:
        """Send a request on a connection that was kept: its answer, of which nothing has come; None: none is kept."""
        return self._client.begin(self._head_of(request), request.body)

    def connect(self, request: Request) -> Awaitable[Response]:
        """Send a request on a new connection: its answer, of which nothing has come.

        Raises:
            NotReached: nothing was sent.
        """
        return self._client.connect(self._head_of(request), request.body)

    async def control(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Ask for something of our own; its status and what it says.

        Raises:
            NotReached: nothing was sent.
            UpstreamDown: it hung up, or took longer than `timeout_s`.
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
        """What it answers to a read; None where it does not answer with 200."""
        try:
            status, told = await self.control("GET", path)
        except UpstreamDown:
            return None
        return told if status == 200 else None

    async def close(self) -> None:
        """Close every connection."""
        self._client.close()
        self._control.close()

    def _head_of(self, request: Request) -> bytes:
        head = self._heads.get(request.path)
        if head is None:
            head = self._heads[request.path] = self._head("POST", request.path) + "x-request-id: "
        asked, more = request.headers, ""
        if request.trace or _VERSION in asked or _BETA in asked:
            more = _more(request)
        return f"{head}{request.id}\r\n{more}content-length: {len(request.body)}\r\n\r\n".encode("latin-1")

    def _head(self, method: str, path: str) -> str:
        """A request's first line, and the headers that are always the same."""
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
    """Headers that only some requests have: those of the app's that pass, then the trace's."""
    asked = request.headers
    told = [(name.decode(), asked[name].decode("latin-1")) for name in DIALECT_HEADERS if name in asked]
    return "".join(f"{name}: {value}\r\n" for name, value in (*told, *request.trace.items()))


def why(error: UpstreamDown) -> str:
    """What happened, for whoever runs the server."""
    return str(error.__cause__ or error) or type(error.__cause__).__name__


def lacks_model(status: int, body: bytes, model: str) -> bool:
    """Whether vLLM answered that it has no model of that name."""
    return status == 404 and model.encode() in body


def engine_died(status: int, body: bytes) -> bool:
    """Whether vLLM answered that its engine is dead."""
    return status == 500 and _ENGINE_DEAD in body


def refusal(response: Response, body: bytes, speaker: Speaker) -> ProxyError | None:
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
