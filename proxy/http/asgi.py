"""Read request bodies and send answers with ASGI's own messages, without a framework."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Protocol

from proxy.errors import BadRequest, ClientDisconnected, TooLarge, TooSlow

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Routes = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
HEADERS = "whetstone.headers"
"""Key of a request's scope that holds its headers by name."""
EXCHANGE = "whetstone.exchange"
"""Key of a request's scope that holds its `RequestAccess`, if it came over a `server_connection.Connection`."""


class RequestAccess(Protocol):
    """Access to a request without ASGI's messages: sooner and cheaper."""

    def whole_bytes(self) -> int | None:
        """Return the size of the request's body if the whole body has arrived and nothing was received yet, else
        None."""
        ...

    def whole_body(self, limit_bytes: int) -> bytes | None:
        """Return that body and mark it as received. None if it has not arrived (use `read_whole`), or is over the
        limit."""
        ...

    def cancel_when_gone(self) -> None:
        """Cancel the serving task when the app disconnects before its answer is sent; at once if it already has."""
        ...

    def stop_cancelling(self) -> None:
        """Stop cancelling the task on a disconnect."""
        ...

    def was_client_disconnect(self, error: BaseException) -> bool:
        """Return whether this error is the cancellation that a disconnect caused. If so, the serving task continues."""
        ...


def exchange_of(scope: Scope) -> RequestAccess | None:
    """Return the request's `RequestAccess`, or None if it has none."""
    exchange: RequestAccess | None = scope.get(EXCHANGE)
    return exchange


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
        other = kind.decode("latin-1")[:100] or "none"
        raise BadRequest(f"the content type must be application/json, not {other}", param="content-type")


async def until_disconnected(receive: Receive) -> None:
    """Return when the app has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
    task = asyncio.ensure_future(serving)
    leaving = asyncio.ensure_future(until_disconnected(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


def with_headers(send: Send, headers: list[Header]) -> Send:
    """Return a `send` that adds these headers to the answer."""
    return _WithHeaders(send, headers)


class _WithHeaders:
    """The wrapper that `with_headers` returns."""

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
    more: Callable[[bytes], bool] = getattr(send, "more", _never)
    return more


def _never(_piece: bytes) -> bool:
    return False


def headers_in(lines: bytes) -> list[Header]:
    """Return the headers that `send_whole` received as lines."""
    parts = [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, _, value in parts]


async def _send_both(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send, headers: list[Header]) -> None:
    """Start a stream of events that no proxy on the way may buffer."""
    constant = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": [*constant, *headers]})
