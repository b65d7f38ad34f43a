"""What is served and recorded: from the request's bytes to the last byte out, with its Calls recorded before it.

Raw ASGI: a framework's route would cost more than all of this. Knows the order of things; what the bytes mean is
`wire`'s, what becomes of the Calls the recorder's.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from proxy import replays
from proxy import watch as watching
from proxy.address import address_of
from proxy.asgi import (
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
from proxy.call import Status
from proxy.client_response import EVENT_STREAM, Response, too_long
from proxy.ends import Ends
from proxy.errors import NotRecorded, UpstreamDown
from proxy.history import Normaliser
from proxy.keys import PRINCIPAL
from proxy.pins import pin_of
from proxy.policies import Policies
from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.replays import Replays, Reply
from proxy.threads import Threads
from proxy.turn import Ended, Turn, owner_of
from proxy.upstream import Answering, Request, refusal
from proxy.wire.body import read_body
from proxy.wire.dialect import UNREADABLE, Server, Stream
from proxy.wire.dialects import ask
from whetstone.ids import new_id
from whetstone.keys import Principal
from whetstone.serving import ProxySettings

JSON = (b"content-type", b"application/json")
SAID = "whetstone.said"
"""Where a request's scope has what its URL said of the call."""
_NOTHING_SAID: Mapping[str, str] = {}
MAX_ERROR_CHARACTERS = 2000
"""Of an error of upstream's, kept with the record."""

log = logging.getLogger(__name__)


class Inference:
    """The routes of `dialects.PATHS`.

    `policies` gives what the database last told, `vllm` what vLLM did; `upstreams` are by name, vLLM under None.
    """

    def __init__(
        self,
        project: str,
        policies: Callable[[], Policies],
        upstreams: Mapping[str | None, Answering],
        vllm: Callable[[], Server],
        recorder: Recorder,
        answered: Replays,
        threads: Threads,
        settings: ProxySettings,
        charge: Callable[[Principal, int], None],
        redactor: Redactor | None = None,
        *,
        no_train: bool = False,
    ) -> None:
        """`no_train`: of no call, whatever it says itself."""
        self._redactor = redactor
        self._no_train = no_train
        self._ends = Ends(recorder, threads, answered, charge)
        self._project = project
        self._policies = policies
        self._upstreams = upstreams
        self._vllm = vllm
        self._recorder = recorder
        self._answered = answered
        self._threads = threads
        self._settings = settings
        self._max_body_bytes = settings.max_body_bytes
        self._normaliser = Normaliser(
            settings.normalise, settings.normalise_timeout_s, settings.kept_calls, keeps_texts=redactor is None
        )
        self._in_flight = 0
        self._last_ended = time.monotonic()
        self._pin_lifetime_s = settings.pin_lifetime_s if settings.pin == "trajectory" else 0.0
        self._session_headers = tuple(name.encode() for name in settings.session_headers)

    @property
    def quiet_since_s(self) -> float | None:
        """When the last request ended (monotonic seconds); None while one is served."""
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
    ) -> Turn:
        """What is asked, by whom, and who would answer it.

        Raises:
            ProxyError: it cannot be served.
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
            # No key's id has a slash: what one key names, another cannot.
            address = msgspec.structs.replace(address, turn_key=f"{key_id}/{address.turn_key}")
        speaker = self._policies().resolve(body.model)
        asked = ask(path, body, self._vllm() if speaker.upstream is None else Server(captured=False))
        return Turn(
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

    async def _answer_once(self, turn: Turn, headers: Mapping[bytes, bytes], send: Send) -> None:
        """Of a turn that has a key: what was answered before is said again."""
        key = turn.address.turn_key
        assert key is not None
        async with self._answered.turn(key, turn.digest) as reply:
            if reply is None:
                turn.sent = []
                await self._answer(turn, headers, send)
            else:
                await _again(reply, send)

    async def _answer(self, turn: Turn, headers: Mapping[bytes, bytes], send: Send) -> None:
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
                # What upstream did after its last event harms nobody.
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
                except asyncio.CancelledError:  # the app has gone meanwhile, which it does but once
                    await self._cut_off(turn, "error", stream, repr(error))
                    raise
            raise
        finally:
            if not turn.recorded:  # what was heard could not be told
                self._ends.nothing(turn)

    def _request(self, turn: Turn, headers: Mapping[bytes, bytes]) -> Request:
        """As it stands now: where it had to wait, another version may be to answer it, as the database last told.

        Raises:
            UnknownModel: the version that it asks for by name has just gone.
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

    async def _plain(self, turn: Turn, response: Response, send: Send) -> None:
        """Record a whole answer and send it; then give up the response, as `with` would, which costs more."""
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
            ended = Ended("complete", answer.heard, answer.upstream_id, None, reply)
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

    async def _pass_events(self, turn: Turn, response: Response, stream: Stream, send: Send) -> None:
        size, held, most, more = 0, b"", self._settings.max_answer_bytes, more_of(send)

        def take(data: bytes) -> bool:
            """Pass it on; whether nothing is held that has to wait.

            Raises:
                UpstreamDown: it cannot be read, or is too much.
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

    async def _finish(self, turn: Turn, stream: Stream, send: Send) -> None:
        """Record, then send the last byte."""
        last = stream.last()
        status: Status = "error" if stream.error else "complete"
        reply: bytes | None = None
        if turn.sent is not None and status == "complete":
            reply = _reply(turn, turn.headers(), b"".join((*turn.sent, last)))
        try:
            await self._end(turn, Ended(status, stream.heard, stream.upstream_id, stream.error, reply))
            await self._recorder.durable()
        except NotRecorded as error:
            if turn.ttft_ms is None:
                raise
            last = b"data: " + error.body() + b"\n\n"
        if turn.ttft_ms is None:
            await _begin(turn, send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _cut_off(self, turn: Turn, status: Status, stream: Stream | None, error: str | None = None) -> None:
        """Record what came of an answer that is not whole; None: nothing did."""
        stream = stream or turn.asked.events()
        await self._end(turn, Ended(status, stream.heard, stream.upstream_id, error))

    async def _end(self, turn: Turn, ended: Ended) -> None:
        """Record it and let others go on from it: an app may have heard all of a stream before its last byte."""
        self._ends.over(turn, await self._ends.record(turn, ended))

    async def _broken(self, turn: Turn, stream: Stream | None, down: UpstreamDown) -> None:
        """Record what upstream broke off. Before the first byte the app gets an error; after it, as without us, no end.

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

    async def _pass_error(self, turn: Turn, response: Response, send: Send) -> None:
        """Record that upstream refused, and pass on why."""
        body = await response.read(self._settings.max_answer_bytes)
        told = body[:MAX_ERROR_CHARACTERS].decode("utf-8", "replace")
        await self._cut_off(turn, "error", None, f"{response.status}: {told}")
        if error := refusal(response, body, turn.speaker):
            raise error
        if turn.speaker.upstream is None:
            # vLLM knows the model by another name than the app.
            body = body.replace(turn.speaker.served_name.encode(), turn.asked.model.encode())
        headers = [(b"content-type", response.headers.get(b"content-type", b"application/json"))]
        if retry_after := response.headers.get(b"retry-after"):
            headers.append((b"retry-after", retry_after))
        said = turn.asked.error(body, response.status)
        await send_whole(send, response.status, headers, said, turn.header_lines())


def _reply(turn: Turn, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """The answer as it may be asked for again."""
    return replays.encode(Reply(turn.digest, turn.asked.stream, headers, body))


async def _again(reply: Reply, send: Send) -> None:
    """Send a finished answer once more."""
    if reply.streamed:
        await begin_stream(send, reply.headers)
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})
    else:
        await send_whole(send, 200, reply.headers, reply.body)


async def _begin(turn: Turn, send: Send) -> None:
    """Open the stream to the app, now that there is something to say: until then it could still be an error."""
    turn.ttft_ms = turn.elapsed_ms()
    await begin_stream(send, turn.headers())
