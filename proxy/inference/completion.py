"""Finish a call: record it, let other calls continue it, charge its key, store the answer for retries. Report it.

A report is one log line, and one span if spans are collected. Neither contains any text of the conversation. Both end
with the answer's last byte. The span continues the trace that the app began (W3C `traceparent`), and vLLM continues
ours.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from typing import TYPE_CHECKING

from proxy.domain.call import Call
from proxy.inference.context import CallContext, CallResult
from proxy.inference.idempotency import Replays
from proxy.recording.recorder import Recorder
from proxy.trajectories.resolver import TrajectoryResolver
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import version_id
from whetstone.observability import log_setup, tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_TRACE_HEADERS = ("traceparent", "tracestate")

Report = tuple["Span | None", Token[Mapping[str, log_setup.Value]]]

log = logging.getLogger("proxy.inference.access_log")
"""Operators select the lines of calls by this name (docs/logs.md)."""


class CallFinisher:
    """Finishes calls, each once (`CallContext.recorded`)."""

    def __init__(
        self,
        recorder: Recorder,
        resolver: TrajectoryResolver,
        replays: Replays,
        charge: Callable[[Principal, int], None],
    ) -> None:
        self._recorder = recorder
        self._resolver = resolver
        self._replays = replays
        self._charge = charge

    async def record(self, context: CallContext, result: CallResult) -> Sequence[Call]:
        """Redact and record a call; return what was recorded, for `on_recorded`.

        Raises:
            NotRecorded: the journal accepts nothing, and unrecorded answers are not wanted.
        """
        if context.redactor is None:
            return self.record_now(context, result)
        try:
            calls = await context.redactor.calls_off_loop(context.calls(result))
        except Exception:
            self.on_discarded(context)
            raise
        # Mark the call only now: if an app disconnects during redaction, the call is still to be recorded.
        return self._hand_over(context, result, calls)

    def record_now(self, context: CallContext, result: CallResult) -> Sequence[Call]:
        """Do the same as `record`, without redaction."""
        try:
            calls = context.calls(result)
        except Exception:
            self.on_discarded(context)
            raise
        return self._hand_over(context, result, calls)

    def on_recorded(self, context: CallContext, recorded: Sequence[Call]) -> None:
        """Let other calls continue what was recorded. Call this at the latest in the event loop turn in which an app
        may have received the whole answer. Called after the last byte of a whole answer, it delays no request."""
        for call in recorded:
            self._resolver.on_recorded(call, context.question)

    def on_discarded(self, context: CallContext) -> None:
        """Forget a call that failed and could not be recorded."""
        context.recorded = True
        assert context.place is not None
        self._resolver.on_discarded(context.id, context.question, context.place)

    def _hand_over(self, context: CallContext, result: CallResult, calls: Sequence[Call]) -> Sequence[Call]:
        principal, turn_key = context.principal, context.address.turn_key
        context.recorded, context.result = True, result
        recorded: list[Call] = []
        try:
            for call in calls:
                if self._recorder.record_or_drop(call):
                    recorded.append(call)
                else:
                    context.dropped = True
                # Only limited keys are charged.
                if principal is not None and principal.tokens_per_min is not None:
                    self._charge(principal, call.tokens)
        except Exception:
            self._in_part(context, recorded)
            raise
        if context.dropped:
            self._in_part(context, recorded)
            return ()
        if result.reply is not None and turn_key is not None:
            self._replays.keep(turn_key, result.reply)
        return recorded

    def _in_part(self, context: CallContext, recorded: Sequence[Call]) -> None:
        """Finish a call that was recorded in part: let other calls continue that part, and only then release the
        request, because a retry of an aborted call is recognised by it."""
        self.on_recorded(context, recorded)
        self.on_discarded(context)


def begin_report(tracer: "Tracer | None", context: CallContext, headers: Mapping[bytes, bytes]) -> Report:
    """Begin the report of a call: every log line names it, until `end_report`. `tracer` None: nothing is traced."""
    span = None if tracer is None else _start_span(tracer, context, headers)
    own = {"call": context.id, "project": context.project, "key": context.key_id}
    return span, log_setup.FIELDS.set({**log_setup.FIELDS.get(), **own})


def end_report(report: Report, context: CallContext, failed: str) -> None:
    """Write the log line and end the span. `failed`: class name of the error that ended the call, or an empty
    string."""
    span, log_token = report
    try:
        if log.isEnabledFor(logging.INFO):
            _log_call(context, failed)
        if span is not None:
            _end_span(span, context, failed)
    finally:
        log_setup.FIELDS.reset(log_token)


def _log_call(context: CallContext, failed: str) -> None:
    result, place = context.result, context.place
    with log_setup.about(
        trajectory=place.trajectory_id if place is not None else None,
        group=context.address.group_id,
        version=version_id(context.speaker.policy, context.speaker.version),
    ):
        if result is None:
            log.info("%s after %.0f ms", failed or "answered as before", context.elapsed_ms())
        else:
            counts = ("?" if count is None else count for count in result.tokens)
            log.info("%s in %.0f ms: %s tokens in, %s out", result.status, context.elapsed_ms(), *counts)


def _start_span(tracer: "Tracer", context: CallContext, headers: Mapping[bytes, bytes]) -> "Span":
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    request = context.request
    w3c = TraceContextTextMapPropagator()
    carried = {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers}
    operation = "text_completion" if request.endpoint == "completions" else "chat"  # as in OpenTelemetry's conventions
    span = tracer.start_span(
        f"{operation} {request.model}",
        context=w3c.extract(carried),
        kind=SpanKind.CLIENT,
        start_time=int(context.created_at_s * 1e9),
    )
    tracing.set_attributes(
        span,
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": context.speaker.upstream or "vllm",
            "gen_ai.request.model": request.model,
            "gen_ai.request.stream": request.stream,
            tracing.PROJECT: context.project,
            tracing.CALL: context.id,
            tracing.COMPLETION: context.id,
            tracing.GROUP: context.address.group_id,
        },
    )
    w3c.inject(context.trace_headers, context=set_span_in_context(span))
    return span


def _end_span(span: "Span", context: CallContext, failed: str) -> None:
    result, speaker, place, server = context.result, context.speaker, context.place, context.server
    trajectory_id = place.trajectory_id if place is not None else None
    attributes: dict[str, tracing.Value] = {
        "gen_ai.response.model": speaker.served_name,
        "gen_ai.conversation.id": trajectory_id,
        tracing.TRAJECTORY: trajectory_id,
        tracing.SESSION: trajectory_id,
        "server.address": server[0] if server is not None else None,
        "server.port": server[1] if server is not None else None,
    }
    if result is not None:
        attributes |= {
            "gen_ai.response.id": result.answer_id,
            "gen_ai.response.finish_reasons": result.finish_reasons or None,
            "gen_ai.usage.input_tokens": result.tokens[0],
            "gen_ai.usage.output_tokens": result.tokens[1],
        }
    if context.ttft_ms is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = context.ttft_ms / 1000
        span.add_event("first token", timestamp=int(context.created_at_s * 1e9 + context.ttft_ms * 1e6))
    tracing.set_attributes(span, attributes)
    if failed or (result is not None and result.status != "complete"):
        tracing.failed(span, failed or (result.status if result is not None else "error"))
    span.end()
