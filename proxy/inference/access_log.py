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


def begin(turn: CallContext, headers: Mapping[bytes, bytes]) -> Watch:
    """Begin to watch a call: every log line names it, until `end`."""
    tracer = tracing.tracer()
    span = None if tracer is None else _begun(tracer, turn, headers)
    return span, log_setup.begin({"call": turn.id, "project": turn.project, "key": turn.key_id})


def end(watch: Watch, turn: CallContext, failed: str) -> None:
    """Write the log line and end the span. `failed`: class name of the error that ended the call, or an empty
    string."""
    span, saying = watch
    try:
        if log.isEnabledFor(logging.INFO):
            _tell(turn, failed)
        if span is not None:
            _end(span, turn, turn.ended, failed)
    finally:
        log_setup.end(saying)


def _tell(turn: CallContext, failed: str) -> None:
    ended, place = turn.ended, turn.place
    with log_setup.about(
        trajectory=place.trajectory_id if place is not None else None,
        group=turn.address.group_id,
        version=version_id(turn.speaker.policy, turn.speaker.version),
    ):
        if ended is None:
            log.info("%s after %.0f ms", failed or "answered as before", turn.elapsed_ms())
        else:
            tokens = ended.tokens
            log.info("%s in %.0f ms: %s tokens in, %s out", ended.status, turn.elapsed_ms(), *map(_count, tokens))


def _count(tokens: int | None) -> str:
    return "?" if tokens is None else str(tokens)


def _begun(tracer: "Tracer", turn: CallContext, headers: Mapping[bytes, bytes]) -> "Span":
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    asked = turn.asked
    w3c = TraceContextTextMapPropagator()
    carried = {name: headers[name.encode()].decode("latin-1") for name in _TRACE_HEADERS if name.encode() in headers}
    operation = _OPERATIONS.get(asked.endpoint, "chat")
    span = tracer.start_span(
        f"{operation} {asked.model}",
        context=w3c.extract(carried),
        kind=SpanKind.CLIENT,
        start_time=int(turn.created_at_s * 1e9),
    )
    tracing.told(
        span,
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": turn.speaker.upstream or "vllm",
            "gen_ai.request.model": asked.model,
            "gen_ai.request.stream": asked.stream,
            tracing.PROJECT: turn.project,
            tracing.CALL: turn.id,
            tracing.GROUP: turn.address.group_id,
        },
    )
    w3c.inject(turn.trace_headers, context=set_span_in_context(span))
    return span


def _end(span: "Span", turn: CallContext, ended: CallResult | None, failed: str) -> None:
    speaker, place, server = turn.speaker, turn.place, turn.server
    told: dict[str, tracing.Value] = {
        "gen_ai.response.model": speaker.served_name,
        "gen_ai.conversation.id": place.trajectory_id if place is not None else None,
        "server.address": server[0] if server is not None else None,
        "server.port": server[1] if server is not None else None,
    }
    if ended is not None:
        told |= {
            "gen_ai.response.id": ended.answer_id,
            "gen_ai.response.finish_reasons": ended.finish_reasons or None,
            "gen_ai.usage.input_tokens": ended.tokens[0],
            "gen_ai.usage.output_tokens": ended.tokens[1],
        }
    if turn.ttft_ms is not None:
        told["gen_ai.response.time_to_first_chunk"] = turn.ttft_ms / 1000
        span.add_event("first token", timestamp=int(turn.created_at_s * 1e9 + turn.ttft_ms * 1e6))
    tracing.told(span, told)
    if failed or (ended is not None and ended.status != "complete"):
        tracing.failed(span, failed or (ended.status if ended is not None else "error"))
    span.end()
