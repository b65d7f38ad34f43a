"""`POST /v1/chat/completions`: from the request's bytes to the last byte out, with one frozen Call recorded before it.

Raw ASGI: a framework's route would cost more than all of this. Knows the order of things; what the bytes mean is
`request`'s, `answer`'s and `events`'s.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import msgspec

from proxy.address import Address, address_of
from proxy.answer import UNREADABLE, read_answer
from proxy.call import Call, Choice, Status
from proxy.errors import AdapterLoading, Gone, NotRecorded, TooLarge, UpstreamDown
from proxy.events import DONE_EVENT, Stream
from proxy.policies import Policy, Speaker, resolve
from proxy.recorder import Recorder
from proxy.request import Asked, read_request
from proxy.upstream import Upstream
from whetstone.ids import new_id

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger(__name__)


class _Turn(msgspec.Struct):
    """One call on its way."""

    id: str
    asked: Asked
    address: Address
    trajectory_id: str
    threaded_by: str
    speaker: Speaker
    created_at_s: float
    began: float
    ttft_ms: float | None = None
    """Milliseconds to the first event; None until it was sent."""
    recorded: bool = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer says about itself."""
        headers = [
            (b"x-completion-id", self.id.encode()),
            (b"x-trajectory-id", self.trajectory_id.encode()),
            (b"x-policy-version", str(self.speaker.version).encode()),
            (b"x-threaded-by", self.threaded_by.encode()),
        ]
        if self.address.group_id is not None:
            headers.append((b"x-group-id", self.address.group_id.encode()))
        return headers


class Inference:
    """The route. `policies` gives what the database last told."""

    def __init__(
        self,
        project: str,
        policies: Callable[[], dict[str, Policy]],
        upstream: Upstream,
        recorder: Recorder,
        max_body_bytes: int,
    ) -> None:
        self._project = project
        self._policies = policies
        self._upstream = upstream
        self._recorder = recorder
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one chat request.

        Raises:
            ProxyError: before anything was sent; the caller answers it.
        """
        created_at_s, began = time.time(), time.perf_counter()
        headers = dict(scope["headers"])
        asked = read_request(await read_body(receive, self._max_body_bytes))
        address = address_of(headers)
        turn = _Turn(
            id=new_id(),
            asked=asked,
            address=address,
            trajectory_id=address.trajectory_id or new_id(),
            threaded_by="new" if address.trajectory_id is None else "header",
            speaker=resolve(self._policies(), asked.model),
            created_at_s=created_at_s,
            began=began,
        )
        answering = asyncio.ensure_future(self._answer(turn, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelling the answer closes the connection to vLLM, which then aborts the generation.
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        try:
            await answering
        except asyncio.CancelledError:
            log.info("call %s: the app hung up", turn.id)

    async def _answer(self, turn: _Turn, send: Send) -> None:
        body = turn.asked.for_upstream(turn.speaker.served_name, cache_salt=self._project)
        stream = Stream(turn.asked)
        try:
            try:
                async with self._upstream.post("/v1/chat/completions", body, turn.id) as response:
                    if response.status != 200:
                        return await self._pass_error(turn, response, send)
                    if response.content_type != "text/event-stream":
                        return await self._plain(turn, await response.read(), send)
                    await self._pass_events(turn, response, stream, send)
            except UpstreamDown as down:
                # What vLLM did after its last event harms nobody.
                if not stream.done:
                    return self._broken(turn, stream, down)
            await self._finish(turn, stream, send)
        except asyncio.CancelledError:
            if not turn.recorded:
                self._record_stream(turn, "aborted", stream)
            raise

    async def _plain(self, turn: _Turn, body: bytes, send: Send) -> None:
        try:
            answer = read_answer(body, turn.asked)
        except UNREADABLE as error:
            raise UpstreamDown(f"the model server's answer cannot be read: {error}") from error
        self._record(turn, "complete", answer.choices, answer.prompt_token_ids, answer.prompt_tokens)
        await _send_whole(send, 200, [(b"content-type", b"application/json"), *turn.headers()], answer.for_app)

    async def _pass_events(self, turn: _Turn, response: aiohttp.ClientResponse, stream: Stream, send: Send) -> None:
        async for data in response.content.iter_any():
            try:
                events = stream.feed(data)
            except UNREADABLE as error:
                raise UpstreamDown(f"an event of the model server cannot be read: {error}") from error
            if events:
                await _begin(turn, send)
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if not stream.done:
            raise UpstreamDown("the model server ended its stream without [DONE]")

    async def _finish(self, turn: _Turn, stream: Stream, send: Send) -> None:
        """Record, then send the last byte."""
        try:
            self._record_stream(turn, "error" if stream.error else "complete", stream, error=stream.error)
            last = DONE_EVENT
        except NotRecorded as error:
            if turn.ttft_ms is None:
                raise
            last = b"data: " + error.body() + b"\n\n"
        await _begin(turn, send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _broken(self, turn: _Turn, stream: Stream, down: UpstreamDown) -> None:
        """Record what vLLM broke off. Before the first byte the app gets an error; after it, as without us, no end.

        Raises:
            UpstreamDown: nothing was sent yet.
        """
        try:
            self._record_stream(turn, "error", stream, error=stream.error or down.message)
        except NotRecorded:
            log.error("call %s broke off and was not recorded: %s", turn.id, down.message)
        if turn.ttft_ms is None:
            raise down

    async def _pass_error(self, turn: _Turn, response: aiohttp.ClientResponse, send: Send) -> None:
        body = await response.read()
        if response.status == 404:
            raise AdapterLoading(
                f"version {turn.speaker.version} of {turn.speaker.policy!r} is being loaded again; try again soon"
            )
        if response.status >= 500:
            self._record(turn, "error", (), None, None, error=body.decode("utf-8", "replace")[:2000])
        # vLLM names the adapter; the app knows the model by the name it asked for.
        body = body.replace(turn.speaker.served_name.encode(), turn.asked.model.encode())
        content_type = response.headers.get("content-type", "application/json").encode()
        await _send_whole(send, response.status, [(b"content-type", content_type), *turn.headers()], body)

    def _record_stream(self, turn: _Turn, status: Status, stream: Stream, error: str | None = None) -> None:
        self._record(turn, status, stream.choices, stream.prompt_token_ids, stream.prompt_tokens, error=error)

    def _record(
        self,
        turn: _Turn,
        status: Status,
        choices: tuple[Choice, ...],
        prompt_token_ids: list[int] | None,
        prompt_tokens: int | None,
        error: str | None = None,
    ) -> None:
        call = Call(
            id=turn.id,
            project=self._project,
            policy=turn.speaker.policy,
            policy_version=turn.speaker.version,
            endpoint="chat.completions",
            streamed=turn.asked.stream,
            status=status,
            error=error,
            trajectory_id=turn.trajectory_id,
            threaded_by=turn.threaded_by,
            address=turn.address,
            end_user=turn.asked.end_user,
            messages=turn.asked.messages,
            tools_or_null=turn.asked.tools_or_null,
            sampling=msgspec.Raw(turn.asked.sampling()),
            bent=turn.asked.why_not_trained(),
            prompt_token_ids=prompt_token_ids,
            prompt_tokens=prompt_tokens,
            choices=choices,
            created_at_s=turn.created_at_s,
            ttft_ms=turn.ttft_ms,
            total_ms=(time.perf_counter() - turn.began) * 1000,
        )
        self._recorder.record(call)
        turn.recorded = True


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request's whole body.

    Raises:
        TooLarge: it has more than `limit` bytes; the rest is not read.
        Gone: the app hung up before its end.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone("the app hung up")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise TooLarge(f"the body is over {limit} bytes (setting proxy.max_body_bytes)")
        if not message.get("more_body"):
            return b"".join(parts)


async def _begin(turn: _Turn, send: Send) -> None:
    """Open the stream to the app, once there is something to say: until then it can still be an error."""
    if turn.ttft_ms is not None:
        return
    turn.ttft_ms = (time.perf_counter() - turn.began) * 1000
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        *turn.headers(),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
