"""ASGI by hand: reading a request's body, sending an answer. Knows the protocol's messages; no route."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Protocol

from proxy.errors import BadRequest, Gone, TooLarge, TooSlow

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Routes = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
HEADERS = "whetstone.headers"
"""Where a request's scope has its headers by name."""
NOTES = "whetstone.notes"
"""Where a request's scope has what was found out about its head, if that came before: one dictionary for all requests
with the very same head, but for their bodies' length, on one connection. Only what depends on nothing else stays in it.
"""
EXCHANGE = "whetstone.exchange"
"""Where a request's scope has what `Exchanged` tells, if it came over a connection of ours."""


class Exchanged(Protocol):
    """What is known of a request beside ASGI's messages, sooner and cheaper."""

    def whole_bytes(self) -> int | None:
        """Size of the request's body, if all of it is there and nobody has received any."""
        ...

    def whole_body(self, limit_bytes: int) -> bytes | None:
        """That body, which counts as received; None where it is not there (`read_whole`), or over the limit."""
        ...

    def cancel_when_gone(self) -> None:
        """Have whoever serves it cancelled when the app hangs up before its answer is out; at once if it has."""
        ...

    def never_mind(self) -> None:
        """Have nobody cancelled any more."""
        ...

    def spared(self, error: BaseException) -> bool:
        """Whether this is how it was cancelled because the app has hung up: then whoever serves it goes on."""
        ...


def exchange_of(scope: Scope) -> Exchanged | None:
    """What is known of a request beside ASGI's messages."""
    found: Exchanged | None = scope.get(EXCHANGE)
    return found


def headers_of(scope: Scope) -> Mapping[bytes, bytes]:
    """The request's headers by name, which is in lower case; of one that comes twice the last."""
    headers: Mapping[bytes, bytes] | None = scope.get(HEADERS)
    if headers is None:
        headers = scope[HEADERS] = dict(scope["headers"])
    return headers


async def read_whole(receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """The request's whole body.

    Raises:
        TooLarge: it has more than `limit_bytes`; the rest is not read.
        TooSlow: it was not there after `timeout_s`.
        Gone: the app hung up before its end.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone("the app hung up")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit_bytes:
                    raise TooLarge(f"the body is over {limit_bytes} bytes (setting proxy.max_body_bytes)")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError as error:
        raise TooSlow(f"the body was not there after {timeout_s:g} s (setting proxy.body_timeout_s)") from error


def check_json(headers: Mapping[bytes, bytes]) -> None:
    """Take JSON only, as vLLM does.

    Raises:
        BadRequest: the content type is another one, or none.
    """
    told = headers.get(b"content-type", b"")
    if told == b"application/json":  # as nearly everybody says it
        return
    kind = told.split(b";", 1)[0].strip().lower()
    if kind != b"application/json":
        other = kind.decode("latin-1")[:100] or "none"
        raise BadRequest(f"the content type must be application/json, not {other}", param="content-type")


async def until_disconnected(receive: Receive) -> None:
    """Return when the app has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float) -> bytes:
    """The request's whole body, at once where it has come already (`read_whole`)."""
    exchange = exchange_of(scope)
    body = None if exchange is None else exchange.whole_body(limit_bytes)
    return await read_whole(receive, limit_bytes, timeout_s) if body is None else body


async def unless_disconnected(serving: Awaitable[None], scope: Scope, receive: Receive) -> bool:
    """Serve a request while its app is there; whether that came to its end. An app that hangs up cancels it."""
    exchange = exchange_of(scope)
    if exchange is None:
        return await unless_received(serving, receive)
    exchange.cancel_when_gone()
    try:
        await serving
    except asyncio.CancelledError as error:
        if not exchange.spared(error):
            raise
        return False
    finally:
        exchange.never_mind()
    return True


async def unless_received(serving: Awaitable[None], receive: Receive) -> bool:
    """As `unless_disconnected`, by ASGI's messages alone."""
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
    """`send`, with these headers on the answer, whatever it is."""
    return _WithHeaders(send, headers)


class _WithHeaders:
    """What `with_headers` gives."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send, self._headers = send, headers
        self.more = more_of(send)
        """See `more_of`: a stream's pieces have no headers."""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def send_whole(
    send: Send, status: int, headers: list[Header], body: bytes, lines: bytes = b""
) -> Coroutine[Any, Any, None]:
    """Send an answer in one piece; where `send` has a `whole` for that, as a connection of ours does, by that.

    `headers` are best those that many answers have alike. `lines`: those that are this one's own, each `name: value`
    and a line break; whoever says them vouches that no value has another, and that none says how an answer is framed.
    """
    whole: Callable[[int, list[Header], bytes, bytes], Coroutine[Any, Any, None]] | None = getattr(send, "whole", None)
    if whole is None:
        return _send_both(send, status, [*headers, *headers_in(lines)], body)
    return whole(status, headers, body, lines)


def more_of(send: Send) -> Callable[[bytes], bool]:
    """What sends another piece of a stream at once and tells whether it did; where not, it is for `send`. `send` may
    have a `more` for that, as a connection of ours does."""
    more: Callable[[bytes], bool] = getattr(send, "more", _never)
    return more


def _never(_piece: bytes) -> bool:
    return False


def headers_in(lines: bytes) -> list[Header]:
    """The headers that `send_whole` was given as lines."""
    told = [line.partition(b": ") for line in lines.split(b"\r\n")[:-1]]
    return [(name, value) for name, _, value in told]


async def _send_both(send: Send, status: int, headers: list[Header], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def begin_stream(send: Send, headers: list[Header]) -> None:
    """Open a stream of events that nobody on the way may hold back."""
    kept = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": [*kept, *headers]})
