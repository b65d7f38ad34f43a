"""Serve the recorded routes: from the request's bytes to the answer's last byte, with the Calls recorded before it.

Raw ASGI: a framework's route would cost more than everything here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from proxy.domain.address import address_of
from proxy.domain.call import Status
from proxy.domain.policies import Policies
from proxy.domain.version_pins import pin_of
from proxy.errors import NotRecorded, UpstreamDown
from proxy.http.asgi import (
    Receive,
    Scope,
    Send,
    begin_stream,
    check_json,
    exchange_of,
    headers_of,
    more_of,
    read_whole,
    send_whole,
    unless_received,
)
from proxy.http.client_response import EVENT_STREAM, Response, too_long
from proxy.http.scope import PRINCIPAL, SAID
from proxy.inference import access_log as watching
from proxy.inference import idempotency
from proxy.inference.completion import CallFinisher
from proxy.inference.context import CallContext, CallResult, owner_of
from proxy.inference.idempotency import Replays, Reply
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.trajectories.conversation_hash import ConversationHasher
from proxy.trajectories.resolver import TrajectoryResolver
from proxy.upstream.server import Answering, Request, refusal
from proxy.wire.interfaces import UNREADABLE, Server, Stream
from proxy.wire.registry import ask
from proxy.wire.request_body import read_body
from whetstone.config.proxy import ProxySettings
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import new_id

JSON = (b"content-type", b"application/json")
_NOTHING_SAID: Mapping[str, str] = {}
MAX_ERROR_CHARACTERS = 2000
"""Most characters of an upstream error that are recorded."""

log = logging.getLogger(__name__)


class Inference:
    """Serves the routes of `RECORDED`.

    `policies` returns the policies that were read last from the database, `vllm` what vLLM reported last. `upstreams`
    are by name, with vLLM under None.
    """

    def __init__(
        self,
        project: str,
        policies: Callable[[], Policies],
        upstreams: Mapping[str | None, Answering],
        vllm: Callable[[], Server],
        recorder: Recorder,
        answered: Replays,
        threads: TrajectoryResolver,
        settings: ProxySettings,
        charge: Callable[[Principal, int], None],
        redactor: Redactor | None = None,
        *,
        no_train: bool = False,
    ) -> None:
        """Create the endpoint. `no_train`: exclude every call from training, whatever the call requests."""
        self._redactor = redactor
        self._no_train = no_train
        self._ends = CallFinisher(recorder, threads, answered, charge)
        self._project = project
        self._policies = policies
        self._upstreams = upstreams
        self._vllm = vllm
        self._recorder = recorder
        self._answered = answered
        self._threads = threads
        self._settings = settings
        self._max_body_bytes = settings.max_body_bytes
        self._normaliser = ConversationHasher(
            settings.normalise, settings.normalise_timeout_s, settings.kept_calls, keeps_texts=redactor is None
        )
        self._in_flight = 0
        self._last_ended = time.monotonic()
        self._pin_lifetime_s = settings.pin_lifetime_s if settings.pin == "trajectory" else 0.0
        self._session_headers = tuple(name.encode() for name in settings.session_headers)

    @property
    def quiet_since_s(self) -> float | None:
        """Return when the last request ended (monotonic seconds); None while one is served."""
        return None if self._in_flight else self._last_ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ProxyError: before anything was sent; the caller answers it.
        """
        self._in_flight += 1
        try:
            created_at_s, began = time.time(), time.perf_counter()
            headers, exchange = headers_of(scope), exchange_of(scope)
            check_json(headers)
            data = None if exchange is None else exchange.whole_body(self._max_body_bytes)
            if data is None:
                data = await read_whole(receive, self._max_body_bytes, self._settings.body_timeout_s)
            turn = self._read(scope, headers, data, created_at_s, began)
            answer = self._answer if turn.address.turn_key is None else self._answer_once
            watch, failed = watching.begin(turn, headers), ""
            try:
                # Cancelling the answer closes the connection to upstream, which then aborts the generation.
                if exchange is None:
                    await unless_received(answer(turn, headers, send), receive)
                else:
                    exchange.cancel_when_gone()
                    await answer(turn, headers, send)
            except BaseException as error:
                if exchange is None or not exchange.spared(error):
                    failed = type(error).__name__
                    raise
            finally:
                if exchange is not None:
                    exchange.never_mind()
                watching.end(watch, turn, failed)
        finally:
            self._in_flight -= 1
            self._last_ended = time.monotonic()

    def _read(
        self, scope: Scope, headers: Mapping[bytes, bytes], data: bytes, created_at_s: float, began: float
    ) -> CallContext:
        """Return the context of a request: its body, its key, and the version that would answer it.

        Raises:
            ProxyError: the request cannot be served.
        """
        path, settings = scope["path"], self._settings
        body = read_body(data, settings.media_domains, settings.max_choices)
        address = address_of(
            headers, scope.get(SAID, _NOTHING_SAID), body.values.get("metadata"), self._session_headers
        )
        if self._no_train:
            address = msgspec.structs.replace(address, no_train=True)
        principal: Principal | None = scope.get(PRINCIPAL)
        key_id = None if principal is None else principal.key_id
        if key_id is not None and address.turn_key is not None:
            # No key id contains a slash, so a turn key of one API key cannot equal that of another.
            address = msgspec.structs.replace(address, turn_key=f"{key_id}/{address.turn_key}")
        speaker = self._policies().resolve(body.model)
        asked = ask(path, body, self._vllm() if speaker.upstream is None else Server(captured=False))
        return CallContext(
            self._project,
            new_id(),
            asked,
            address,
            self._normaliser,
            principal,
            key_id,
            owner_of(key_id, asked.end_user),
            speaker,
            (path, data, key_id),
            created_at_s,
            began,
            self._redactor,
        )

    async def _answer_once(self, turn: CallContext, headers: Mapping[bytes, bytes], send: Send) -> None:
        """Answer a turn that has a key: if it was answered before, send the same answer."""
        key = turn.address.turn_key
        assert key is not None
        async with self._answered.turn(key, turn.digest) as reply:
            if reply is None:
                turn.sent = []
                await self._answer(turn, headers, send)
            else:
                await _again(reply, send)

    async def _answer(self, turn: CallContext, headers: Mapping[bytes, bytes], send: Send) -> None:
        self._recorder.check_room()
        upstream, threads = self._upstreams[turn.speaker.upstream], self._threads
        asked = turn.id, turn.address, turn.goes_on_from(), turn.question
        turn.place = threads.place_at_once(*asked) or await threads.place(*asked)
        stream: Stream | None = None
        try:
            try:
                response = await upstream.ask(self._request, turn, headers)
                turn.server = response.server
                if response.status == 200 and response.content_type != EVENT_STREAM:
                    return await self._plain(turn, response, send)
                with response:
                    if response.status != 200:
                        return await self._pass_error(turn, response, send)
                    stream = turn.asked.events()
                    await self._pass_events(turn, response, stream, send)
            except UpstreamDown as down:
                # An error of upstream after its last event does no harm.
                if stream is None or not stream.done:
                    return await self._broken(turn, stream, down)
            await self._finish(turn, stream, send)
        except asyncio.CancelledError:
            if not turn.recorded:
                await self._cut_off(turn, "aborted", stream)
            raise
        except Exception as error:
            if not turn.recorded:
                try:
                    await self._cut_off(turn, "error", stream, repr(error))
                except asyncio.CancelledError:  # the app disconnected meanwhile, which happens once only
                    await self._cut_off(turn, "error", stream, repr(error))
                    raise
            raise
        finally:
            if not turn.recorded:  # the result could not be recorded
                self._ends.nothing(turn)

    def _request(self, turn: CallContext, headers: Mapping[bytes, bytes]) -> Request:
        """Return the request for the current state: after a wait, another version may have to answer.

        Raises:
            UnknownModel: the version that it requests by name has just been removed.
        """
        place, asked = turn.place, turn.asked
        assert place is not None
        pin = pin_of(place.pins, turn.speaker.policy) if place.pins else None
        policies = self._policies()
        speaker = turn.speaker = policies.settled(asked.model, pin) or policies.choose(
            asked.model, place.trajectory_id, pin, time.time(), self._pin_lifetime_s
        )
        name = speaker.served_name
        body = asked.for_upstream(name, cache_salt=self._project)
        trace = turn.trace_headers if speaker.upstream is None else {}
        return Request(asked.path, body, turn.id, name, place.trajectory_id, headers, trace, turn.prepare)

    async def _plain(self, turn: CallContext, response: Response, send: Send) -> None:
        """Record a whole answer and send it; then release the response as `with` would, which costs more."""
        most_bytes = self._settings.max_answer_bytes
        try:
            body = response.whole(most_bytes)
            if body is None:
                body = await response.read(most_bytes)
            try:
                answer = turn.asked.read(body)
            except UNREADABLE as error:
                raise UpstreamDown(f"the model server's answer cannot be read: {error}") from error
            reply: bytes | None = None
            if turn.sent is not None and answer.status == 200:
                reply = _reply(turn, [JSON, *turn.headers()], answer.for_app)
            ended = CallResult("complete", answer.heard, answer.upstream_id, None, reply)
            if turn.redactor is None:
                recorded = self._ends.at_once(turn, ended)
            else:
                recorded = await self._ends.record(turn, ended)
            if self._recorder.waits:
                self._ends.over(turn, recorded)
                recorded = ()
                await self._recorder.durable()
            try:
                await send_whole(send, answer.status, [JSON], answer.for_app, turn.header_lines())
            finally:
                self._ends.over(turn, recorded)
        except UpstreamDown:
            response.leave(broken=True)
            raise
        finally:
            response.leave()

    async def _pass_events(self, turn: CallContext, response: Response, stream: Stream, send: Send) -> None:
        size, held, most, more = 0, b"", self._settings.max_answer_bytes, more_of(send)

        def take(data: bytes) -> bool:
            """Pass data on; return whether nothing is buffered that has to wait.

            Raises:
                UpstreamDown: the data cannot be read, or is too much.
            """
            nonlocal size, held
            size += len(data)
            if size > most:
                raise too_long(most)
            try:
                events = stream.feed(data)
            except UNREADABLE as error:
                raise UpstreamDown(f"an event of the model server cannot be read: {error}") from error
            if events and turn.sent is not None:
                turn.sent.append(events)
            if events and (turn.ttft_ms is None or not more(events)):
                held = events
            return not held

        while True:
            data = response.at_once()
            if data is None:
                await response.news(None if turn.ttft_ms is None else take)
            elif data:
                take(data)
            else:
                break
            if held:
                if turn.ttft_ms is None:
                    await _begin(turn, send)
                events, held = held, b""
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if not stream.done:
            raise UpstreamDown("the model server broke its stream off")

    async def _finish(self, turn: CallContext, stream: Stream, send: Send) -> None:
        """Record the call, then send the last byte."""
        last = stream.last()
        status: Status = "error" if stream.error else "complete"
        reply: bytes | None = None
        if turn.sent is not None and status == "complete":
            reply = _reply(turn, turn.headers(), b"".join((*turn.sent, last)))
        try:
            await self._end(turn, CallResult(status, stream.heard, stream.upstream_id, stream.error, reply))
            await self._recorder.durable()
        except NotRecorded as error:
            if turn.ttft_ms is None:
                raise
            last = b"data: " + error.body() + b"\n\n"
        if turn.ttft_ms is None:
            await _begin(turn, send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _cut_off(
        self, turn: CallContext, status: Status, stream: Stream | None, error: str | None = None
    ) -> None:
        """Record the received part of an answer that is not whole; `stream` None: nothing was received."""
        stream = stream or turn.asked.events()
        await self._end(turn, CallResult(status, stream.heard, stream.upstream_id, error))

    async def _end(self, turn: CallContext, ended: CallResult) -> None:
        """Record the call and let others continue it: an app may have received a whole stream before its last byte."""
        self._ends.over(turn, await self._ends.record(turn, ended))

    async def _broken(self, turn: CallContext, stream: Stream | None, down: UpstreamDown) -> None:
        """Record what was received before upstream failed. Before the first byte the app gets an error; after it the
        stream has no end, as without the proxy.

        Raises:
            UpstreamDown: nothing was sent yet.
        """
        try:
            if not turn.recorded:
                await self._cut_off(turn, "error", stream, (stream and stream.error) or down.message)
        except NotRecorded:
            log.error("call %s broke off and was not recorded: %s", turn.id, down.message)
        if turn.ttft_ms is None:
            raise down

    async def _pass_error(self, turn: CallContext, response: Response, send: Send) -> None:
        """Record that upstream refused, and pass its error on."""
        body = await response.read(self._settings.max_answer_bytes)
        told = body[:MAX_ERROR_CHARACTERS].decode("utf-8", "replace")
        await self._cut_off(turn, "error", None, f"{response.status}: {told}")
        if error := refusal(response, body, turn.speaker):
            raise error
        if turn.speaker.upstream is None:
            # vLLM has another name for the model than the app.
            body = body.replace(turn.speaker.served_name.encode(), turn.asked.model.encode())
        headers = [(b"content-type", response.headers.get(b"content-type", b"application/json"))]
        if retry_after := response.headers.get(b"retry-after"):
            headers.append((b"retry-after", retry_after))
        said = turn.asked.error(body, response.status)
        await send_whole(send, response.status, headers, said, turn.header_lines())


def _reply(turn: CallContext, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Encode the answer for a later retry."""
    return idempotency.encode(Reply(turn.digest, turn.asked.stream, headers, body))


async def _again(reply: Reply, send: Send) -> None:
    """Send a stored answer."""
    if reply.streamed:
        await begin_stream(send, reply.headers)
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})
    else:
        await send_whole(send, 200, reply.headers, reply.body)


async def _begin(turn: CallContext, send: Send) -> None:
    """Open the stream to the app. This happens with the first event: until then the answer could still be an error."""
    turn.ttft_ms = turn.elapsed_ms()
    await begin_stream(send, turn.headers())
