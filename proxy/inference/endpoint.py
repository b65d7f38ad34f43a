"""Serve the recorded routes: from the request's bytes to the answer's last byte, with the Calls recorded before it.

Raw ASGI: a framework's route would cost more than everything here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from proxy.domain.address import RESPONSES, address_of
from proxy.domain.call import Status
from proxy.domain.policies import Handover, Policies, is_fixed_version, pin_of
from proxy.errors import NotRecorded, UpstreamDown
from proxy.http.asgi import (
    PRINCIPAL,
    URL_ADDRESS,
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
from proxy.inference.completion import CallFinisher, begin_report, end_report
from proxy.inference.context import CallContext, CallResult, owner_of
from proxy.inference.idempotency import Replays, Reply
from proxy.inference.stored_responses import StoredResponses
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.trajectories.conversation_hash import ConversationHasher
from proxy.trajectories.resolver import TrajectoryResolver
from proxy.upstream.load_balancer import Replicas
from proxy.upstream.server import Answering, Request, refusal
from proxy.upstream.spending import SpendingCap
from proxy.wire.decoding import Stream
from proxy.wire.interfaces import UNREADABLE, Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import Body, read_body
from proxy.wire.responses.stored import references_of
from whetstone.config.proxy import ProxySettings
from whetstone.config.rewards import ExploreSettings
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import new_id
from whetstone.domain.sampling_share import in_share
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.observability import tracing

JSON = (b"content-type", b"application/json")
_NO_ADDRESS: Mapping[str, str] = {}
MAX_ERROR_CHARACTERS = 2000
"""Most characters of an upstream error that are recorded."""

log = logging.getLogger(__name__)


class Inference:
    """Serves the routes of `RECORDED`.

    `policies` returns the policies that were read last from the database. `upstreams` are by name, with vLLM under
    None; `vllm` is the same, for what its servers have reported.
    """

    def __init__(
        self,
        project: str,
        policies: Callable[[], Policies],
        upstreams: Mapping[str | None, Answering],
        vllm: Replicas,
        recorder: Recorder,
        replays: Replays,
        resolver: TrajectoryResolver,
        settings: ProxySettings,
        charge: Callable[[Principal, int], None],
        stored: StoredResponses,
        spending: SpendingCap,
        redactor: Redactor | None = None,
        *,
        no_train: bool = False,
        explore: Mapping[str, ExploreSettings] | None = None,
        sign_feedback: Callable[[str | None, str], str] | None = None,
    ) -> None:
        """Create the endpoint.

        `no_train`: exclude every call from training, whatever the call requests. `explore`: by policy, how its calls
        with temperature 0 are explored. `sign_feedback`: make the feedback token of an answer, from the ids of key and
        completion; None: answers have none.
        """
        self._sign_feedback = sign_feedback
        self._redactor = redactor
        self._stored = stored
        self._spending = spending
        self._no_train = no_train
        self._explore = {policy: one for policy, one in (explore or {}).items() if one.share > 0}
        self._finisher = CallFinisher(recorder, resolver, replays, charge)
        self._tracer = tracing.tracer()
        self._project = project
        self._policies = policies
        self._upstreams = upstreams
        self._vllm = vllm
        self._recorder = recorder
        self._replays = replays
        self._resolver = resolver
        self._settings = settings
        self._max_body_bytes = settings.max_body_bytes
        self._hasher = ConversationHasher(
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
            body = read_body(data, self._settings.media_domains, self._settings.max_choices)
            if scope["path"] == RESPONSES:
                body = await self._with_references(body)
            context = self._read(scope, headers, data, body, created_at_s, began)
            answer = self.serve if context.address.turn_key is None else self._serve_once
            report, failed = begin_report(self._tracer, context, headers), ""
            try:
                # Cancelling the answer closes the connection to upstream, which then aborts the generation.
                if exchange is None:
                    await unless_received(answer(context, headers, send), receive)
                else:
                    exchange.cancel_when_gone()
                    await answer(context, headers, send)
            except BaseException as error:
                if exchange is None or not exchange.was_client_disconnect(error):
                    failed = type(error).__name__
                    raise
            finally:
                if exchange is not None:
                    exchange.stop_cancelling()
                end_report(report, context, failed)
        finally:
            self._in_flight -= 1
            self._last_ended = time.monotonic()

    async def _with_references(self, body: Body) -> Body:
        """Return a Responses request with the conversation in place of what it refers to. A server other than vLLM
        keeps its own responses: its requests stay as they came.

        Raises:
            ProxyError: what it refers to is not there, or no policy has the name of its model.
        """
        references = references_of(body.values)
        if references is None or self._policies().resolve(body.model).upstream is not None:
            return body
        return await self._stored.with_references(body, references)

    def _read(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        data: bytes,
        body: Body,
        created_at_s: float,
        began: float,
    ) -> CallContext:
        """Return the context of a request: its address, its key, and the version that would answer it.

        Raises:
            ProxyError: the request cannot be served.
        """
        path = scope["path"]
        address = address_of(
            headers, scope.get(URL_ADDRESS, _NO_ADDRESS), body.values.get("metadata"), self._session_headers
        )
        if self._no_train:
            address = msgspec.structs.replace(address, no_train=True)
        principal: Principal | None = scope.get(PRINCIPAL)
        key_id = None if principal is None else principal.key_id
        if key_id is not None and address.turn_key is not None:
            # No key id contains a slash, so a turn key of one API key cannot equal that of another.
            address = msgspec.structs.replace(address, turn_key=f"{key_id}/{address.turn_key}")
        policies = self._policies()
        speaker, handover = policies.resolve(body.model), policies.handover(body.model)
        if speaker.upstream is None:
            server = Server(max_model_len=self._vllm.max_model_len(), chat_rules=self._vllm.chat_rules)
        else:
            server = Server(captured=False, counts_usage=self._spending.is_priced(self._project, speaker.policy))
        request = DIALECTS[path](body, server)
        for_teacher = None
        if handover is not None:
            counts_usage = self._spending.is_priced(self._project, handover.teacher)
            teacher = msgspec.structs.replace(server, captured=False, is_teacher=True, counts_usage=counts_usage)
            for_teacher = partial(DIALECTS[path], body, teacher)
        return CallContext(
            self._project,
            new_id(),
            request,
            address,
            self._hasher,
            principal,
            key_id,
            owner_of(key_id, request.end_user),
            speaker,
            (path, data, key_id),
            created_at_s,
            began,
            self._redactor,
            self._sign_feedback,
            handover=handover,
            for_teacher=for_teacher,
        )

    async def _serve_once(self, context: CallContext, headers: Mapping[bytes, bytes], send: Send) -> None:
        """Serve a call that has a turn key: if it was answered before, send the same answer."""
        key = context.address.turn_key
        assert key is not None
        async with self._replays.lock(key, context.digest) as reply:
            if reply is None:
                context.sent = []
                await self.serve(context, headers, send)
            else:
                await _send_stored(context, reply, send)

    async def serve(self, context: CallContext, headers: Mapping[bytes, bytes], send: Send) -> None:
        """Serve a call that was admitted and read: place it, choose its version and ask for the answer, relay it,
        record it."""
        self._recorder.check_room()
        if context.speaker.upstream is not None:
            self._spending.check(self._project, context.speaker.policy)
        resolver = self._resolver
        call = context.id, context.address, context.continued_conversation(), context.question
        context.place = resolver.resolve_in_memory(*call) or await resolver.resolve(*call)
        if context.handover is not None:
            self._choose_side(context, context.handover)
        upstream = self._upstreams[context.speaker.upstream]
        stream: Stream | None = None
        try:
            if self._explore:
                await self._may_explore(context)
            try:
                response = await upstream.ask(self._choose_version, context, headers)
                context.server = response.server
                if response.status == 200 and response.content_type != EVENT_STREAM:
                    return await self._relay_whole(context, response, send)
                with response:
                    if response.status != 200:
                        return await self._relay_error(context, response, send)
                    stream = context.request.new_stream()
                    await self._relay_events(context, response, stream, send)
            except UpstreamDown as down:
                # An error of upstream after its last event does no harm.
                if stream is None or not stream.done:
                    return await self._record_failure(context, stream, down)
            await self._record_stream(context, stream, send)
        except asyncio.CancelledError:
            if not context.recorded:
                await self._record_partial(context, "aborted", stream)
            raise
        except Exception as error:
            if not context.recorded:
                try:
                    await self._record_partial(context, "error", stream, repr(error))
                except asyncio.CancelledError:  # the app disconnected meanwhile, which happens once only
                    await self._record_partial(context, "error", stream, repr(error))
                    raise
            raise
        finally:
            if not context.recorded:  # the result could not be recorded
                self._finisher.on_discarded(context)

    def _choose_side(self, context: CallContext, handover: Handover) -> None:
        """Let the teacher answer a call of its trajectories, instead of the policy that was requested; not if the day's
        money is spent."""
        place, for_teacher = context.place, context.for_teacher
        assert place is not None and for_teacher is not None
        if not handover.teacher_answers(place.trajectory_id, context.address.group_id, place.pins):
            return
        if self._spending.refuses(self._project, handover.teacher):
            return
        # A conversation is recognised by the form that it has for the policy's own server.
        context.known_conversation = context.conversation
        context.request, context.teacher = for_teacher(), handover.teacher
        context.speaker = self._policies().resolve(handover.teacher)

    async def _may_explore(self, context: CallContext) -> None:
        """Let the call explore if it is among those that its policy explores with.

        The trajectory and the request decide, so a retry has the same temperature as the call that it repeats. A call
        to a fixed version gets what that version answers at temperature 0: its app compares versions.
        """
        explore, request, place = self._explore.get(context.speaker.policy), context.request, context.place
        if explore is None or explore.temperature is None or request.why_not_trained() != WhyNotTrained.GREEDY:
            return
        assert place is not None
        wanted = context.address.trains and not is_fixed_version(request.model)
        if not (wanted and in_share(f"{place.trajectory_id} {context.digest}", explore.share)):
            return
        if await self._resolver.trains(place.trajectory_id) and request.explore(explore.temperature):
            context.explored = explore.temperature

    def _choose_version(self, context: CallContext, headers: Mapping[bytes, bytes]) -> Request:
        """Return the request for the current state: after a wait, another version may have to answer.

        Raises:
            UnknownModel: the version that it requests by name has just been removed.
        """
        place, request = context.place, context.request
        assert place is not None
        pin = pin_of(place.pins, context.speaker.policy) if place.pins else None
        policies = self._policies()
        model = context.teacher or request.model
        speaker = context.speaker = policies.resolve_fixed(model, pin) or policies.choose_version(
            model, place.trajectory_id, pin, time.time(), self._pin_lifetime_s
        )
        name = speaker.served_name
        return Request(
            request.path,
            request.to_upstream_body(name, cache_salt=self._project),
            context.id,
            name,
            place.trajectory_id,
            headers,
            context.trace_headers if speaker.upstream is None else {},
            context.prepare_record,
        )

    async def _relay_whole(self, context: CallContext, response: Response, send: Send) -> None:
        """Record a whole answer and send it; then release the response as `with` would, which costs more."""
        most_bytes = self._settings.max_answer_bytes
        try:
            body = response.whole(most_bytes)
            if body is None:
                body = await response.read(most_bytes)
            try:
                answer = context.request.read(body)
            except UNREADABLE as error:
                raise UpstreamDown(f"the model server's answer cannot be read: {error}") from error
            replays = context.sent is not None and answer.status == 200
            reply = _reply(context, [JSON, *context.stored_headers()], answer.client_body) if replays else None
            result = CallResult("complete", answer.results, answer.upstream_id, None, reply, answer.stored)
            recorded = (
                self._finisher.record_now(context, result)
                if context.redactor is None
                else await self._finisher.record(context, result)
            )
            if self._recorder.needs_fsync:
                self._finisher.on_recorded(context, recorded)
                recorded = ()
                await self._recorder.durable()
            try:
                await send_whole(send, answer.status, [JSON], answer.client_body, context.header_lines())
            finally:
                self._finisher.on_recorded(context, recorded)
        except UpstreamDown:
            response.release(broken=True)
            raise
        finally:
            response.release()

    async def _relay_events(self, context: CallContext, response: Response, stream: Stream, send: Send) -> None:
        size, pending, most, try_send = 0, b"", self._settings.max_answer_bytes, more_of(send)

        def relay(data: bytes) -> bool:
            """Pass data on; return whether nothing is buffered that has to wait.

            Raises:
                UpstreamDown: the data cannot be read, or is too much.
            """
            nonlocal size, pending
            size += len(data)
            if size > most:
                raise too_long(most)
            try:
                events = stream.feed(data)
            except UNREADABLE as error:
                raise UpstreamDown(f"an event of the model server cannot be read: {error}") from error
            if events and context.sent is not None:
                context.sent.append(events)
            if events and (context.ttft_ms is None or not try_send(events)):
                pending = events
            return not pending

        while True:
            data = response.read_available()
            if data is None:
                await response.wait_more(None if context.ttft_ms is None else relay)
            elif data:
                relay(data)
            else:
                break
            if pending:
                if context.ttft_ms is None:
                    await _open_stream(context, send)
                events, pending = pending, b""
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if not stream.done:
            raise UpstreamDown("the model server broke its stream off")

    async def _record_stream(self, context: CallContext, stream: Stream, send: Send) -> None:
        """Record the call, then send the last byte."""
        last = stream.last()
        status: Status = "error" if stream.error else "complete"
        replays = context.sent if status == "complete" else None
        reply = None if replays is None else _reply(context, context.stored_headers(), b"".join((*replays, last)))
        try:
            stored = stream.stored if status == "complete" else None
            result = CallResult(status, stream.results, stream.upstream_id, stream.error, reply, stored)
            await self._record(context, result)
            await self._recorder.durable()
        except NotRecorded as error:
            if context.ttft_ms is None:
                raise
            last = b"data: " + error.body() + b"\n\n"
        if context.ttft_ms is None:
            await _open_stream(context, send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _record_partial(
        self, context: CallContext, status: Status, stream: Stream | None, error: str | None = None
    ) -> None:
        """Record the received part of an answer that is not whole; `stream` None: nothing was received."""
        stream = stream or context.request.new_stream()
        await self._record(context, CallResult(status, stream.results, stream.upstream_id, error))

    async def _record(self, context: CallContext, result: CallResult) -> None:
        """Record the call and let others continue it: an app may have received a whole stream before its last byte."""
        self._finisher.on_recorded(context, await self._finisher.record(context, result))

    async def _record_failure(self, context: CallContext, stream: Stream | None, down: UpstreamDown) -> None:
        """Record what was received before upstream failed. Before the first byte the app gets an error; after it the
        stream has no end, as without the proxy.

        Raises:
            UpstreamDown: nothing was sent yet.
        """
        try:
            if not context.recorded:
                await self._record_partial(context, "error", stream, (stream and stream.error) or down.message)
        except NotRecorded:
            log.error("call %s broke off and was not recorded: %s", context.id, down.message)
        if context.ttft_ms is None:
            raise down

    async def _relay_error(self, context: CallContext, response: Response, send: Send) -> None:
        """Record that upstream refused, and pass its error on."""
        body = await response.read(self._settings.max_answer_bytes)
        error = f"{response.status}: {body[:MAX_ERROR_CHARACTERS].decode('utf-8', 'replace')}"
        await self._record_partial(context, "error", None, error)
        if refused := refusal(response, body, context.speaker):
            raise refused
        if context.speaker.upstream is None:
            # vLLM has another name for the model than the app.
            body = body.replace(context.speaker.served_name.encode(), context.request.model.encode())
        headers = [(b"content-type", response.headers.get(b"content-type", b"application/json"))]
        if retry_after := response.headers.get(b"retry-after"):
            headers.append((b"retry-after", retry_after))
        body = context.request.error(body, response.status)
        await send_whole(send, response.status, headers, body, context.header_lines())


def _reply(context: CallContext, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Encode the answer for a later retry."""
    return msgspec.msgpack.encode(Reply(context.digest, context.request.stream, headers, body))


async def _send_stored(context: CallContext, reply: Reply, send: Send) -> None:
    """Send a stored answer, with a new feedback token if answers have one."""
    headers = [*reply.headers, *context.token_headers(reply.headers)]
    if reply.streamed:
        await begin_stream(send, headers)
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})
    else:
        await send_whole(send, 200, headers, reply.body)


async def _open_stream(context: CallContext, send: Send) -> None:
    """Open the stream to the app. This happens with the first event: until then the answer could still be an error."""
    context.ttft_ms = context.elapsed_ms()
    await begin_stream(send, context.headers())
