"""Report each call: one log line, and one span if spans are collected. Neither contains any text of the conversation.

Both end with the answer's last byte. The span continues the trace that the app began (W3C `traceparent`), and vLLM
continues ours.
"""

import logging
from collections.abc import Mapping
from contextvars import Token
from typing import TYPE_CHECKING

from proxy.inference.context import CallContext, CallResult
from whetstone.domain.ids import version_id
from whetstone.observability import log_setup, tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_OPERATIONS = {"completions": "text_completion"}
"""Operations that OpenTelemetry's conventions name differently; everything else is `chat`."""
_TRACE_HEADERS = ("traceparent", "tracestate")

Watch = tuple["Span | None", Token[Mapping[str, log_setup.Value]]]

log = logging.getLogger(__name__)


def begin(context: CallContext, headers: Mapping[bytes, bytes]) -> Watch:
    """Begin to watch a call: every log line names it, until `end`."""
    tracer = tracing.tracer()
    span = None if tracer is None else _start_span(tracer, context, headers)
    return span, log_setup.begin({"call": context.id, "project": context.project, "key": context.key_id})


def end(watch: Watch, context: CallContext, failed: str) -> None:
    """Write the log line and end the span. `failed`: class name of the error that ended the call, or an empty
    string."""
    span, log_token = watch
    try:
        if log.isEnabledFor(logging.INFO):
            _log_call(context, failed)
        if span is not None:
            _end_span(span, context, context.result, failed)
    finally:
        log_setup.end(log_token)


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
            tokens = result.tokens
            log.info("%s in %.0f ms: %s tokens in, %s out", result.status, context.elapsed_ms(), *map(_count, tokens))


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


def _start_span(tracer: "Tracer", context: CallContext, headers: Mapping[bytes, bytes]) -> "Span":
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    request = context.request
    w3c = TraceContextTextMapPropagator()
    carried = {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers}
    operation = _OPERATIONS.get(request.endpoint, "chat")
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
            tracing.GROUP: context.address.group_id,
        },
    )
    w3c.inject(context.trace_headers, context=set_span_in_context(span))
    return span


def _end_span(span: "Span", context: CallContext, result: CallResult | None, failed: str) -> None:
    speaker, place, server = context.speaker, context.place, context.server
    attributes: dict[str, tracing.Value] = {
        "gen_ai.response.model": speaker.served_name,
        "gen_ai.conversation.id": place.trajectory_id if place is not None else None,
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
