"""Read request bodies and send answers with ASGI's own messages, without a framework. Define what a scope holds."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from proxy.errors import BadRequest, ClientDisconnected, TooLarge, TooSlow
from whetstone.domain.api_keys import Principal

if TYPE_CHECKING:
    from proxy.http.request_cycle import RequestCycle

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Routes = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
HEADERS = "whetstone.headers"
"""Key of a request's scope that holds its headers by name."""
EXCHANGE = "whetstone.exchange"
"""Key of a request's scope that holds its `RequestCycle`, if it came over a `server_connection.Connection`: access to
the request sooner and cheaper than by ASGI's messages."""
PRINCIPAL = "whetstone.principal"
"""Key of a request's scope that holds the `Principal` whose API key the request came with, or None."""
FEEDBACK_CLAIM = "whetstone.feedback_claim"
"""Key of a request's scope that holds the `FeedbackClaim` of the feedback token that the request came with. Without one
there is no such key."""
URL_ADDRESS = "whetstone.url_address"
"""Key of a request's scope that holds what the request's URL states about the call."""


def exchange_of(scope: Scope) -> "RequestCycle | None":
    """Return the request's `RequestCycle`, or None if it has none."""
    return scope.get(EXCHANGE)


def key_of(scope: Scope) -> str | None:
    """Return the id of the key that a request came with; None where it needed none."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return None if principal is None else principal.key_id


def is_admin(scope: Scope) -> bool:
    """Return whether a request may read everything in its project."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return principal is not None and principal.allows("admin")


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """Return the request's headers by name, in lower case. Of a repeated header the last one counts."""
    headers: Mapping[bytes, bytes] | None = scope.get(HEADERS)
    if headers is None:
        headers = scope[HEADERS] = dict(scope["headers"])
    return headers


async def read_whole(receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """Read and return the request's whole body.

    Raises:
        TooLarge: the body has more than `limit_bytes`; the rest is not read.
        TooSlow: the body was not complete after `timeout_s`.
        ClientDisconnected: the app disconnected before the end of the body.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected("the app hung up")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit_bytes:
                    raise TooLarge(f"the body is over {limit_bytes} bytes (setting proxy.max_body_bytes)")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise TooSlow(f"the body was not there after {timeout_s:g} s (setting proxy.body_timeout_s)") from error


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Accept only JSON, as vLLM does.

    Raises:
        BadRequest: the content type is missing, or is not JSON.
    """
    content_type = headers.get(b"content-type", b"")
    if content_type == b"application/json":  # the common case
        return
    kind = content_type.split(b";", 1)[0].strip().lower()
    if kind != b"application/json":
        raise BadRequest(
            f"the content type must be application/json, not {kind.decode('latin-1')[:100] or 'none'}",
            param="content-type",
        )


async def body_of(scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """Return the request's whole body, without waiting if it has already arrived (see `read_whole`)."""
    exchange = exchange_of(scope)
    body = None if exchange is None else exchange.whole_body(limit_bytes)
    return await read_whole(receive, limit_bytes, timeout_s) if body is None else body


async def unless_disconnected(serving: Awaitable[None], scope: Scope, receive: Receive) -> bool:
    """Serve a request, cancel it if its app disconnects, and return whether it finished."""
    exchange = exchange_of(scope)
    if exchange is None:
        return await unless_received(serving, receive)
    exchange.cancel_when_gone()
    try:
        await serving
    except asyncio.CancelledError as error:
        if not exchange.was_client_disconnect(error):
            raise
        return False
    finally:
        exchange.stop_cancelling()
    return True


async def unless_received(serving: Awaitable[None], receive: Receive) -> bool:
    """Do the same as `unless_disconnected` with ASGI's messages only."""

    async def until_disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(serving)
    leaving = asyncio.ensure_future(until_disconnected())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        task.cancel()  # nothing happens if it is done
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WithHeaders:
    """A `send` that adds these headers to the answer."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send, self._headers = send, headers
        self.more = more_of(send)
        """See `more_of`: the pieces of a stream have no headers."""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def send_whole(
    send: Send, status: int, headers: list[Header], body: bytes, lines: bytes = b""
) -> Coroutine[Any, Any, None]:
    """Send an answer in one piece, using `send.whole` where it exists (a `RequestCycle` has it).

    Put headers that many answers share into `headers`. Put the answer's own into `lines`, each as `name: value` and a
    line break. The caller guarantees that no value contains a line break and that no line sets the answer's framing.
    """
    whole: Callable[[int, list[Header], bytes, bytes], Coroutine[Any, Any, None]] | None = getattr(send, "whole", None)
    if whole is None:
        return _send_both(send, status, [*headers, *headers_in(lines)], body)
    return whole(status, headers, body, lines)


def more_of(send: Send) -> Callable[[bytes], bool]:
    """Return a function that sends another piece of a stream at once and returns whether it did. If it returns False,
    use `send`. A `send` may have a `more` for this, as a `RequestCycle` does."""
    more: Callable[[bytes], bool] = getattr(send, "more", lambda _piece: False)
    return more


def headers_in(lines: bytes) -> list[Header]:
    """Return the headers that `send_whole` received as lines."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])]


async def _send_both(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send, headers: list[Header]) -> None:
    """Start a stream of events that no proxy on the way may buffer."""
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
