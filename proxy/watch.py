"""A call as those who watch see it: one line in the log, and one span where spans are collected. Never what was said.

Both end with the answer's last byte. The span goes on with the trace that the app began (W3C `traceparent`), and vLLM
goes on with ours.
"""

import logging
from collections.abc import Mapping
from contextvars import Token
from typing import TYPE_CHECKING

from proxy.turn import Ended, Turn
from whetstone import logs, tracing
from whetstone.ids import version_id

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_OPERATIONS = {"completions": "text_completion"}
"""How the conventions name what the tables name otherwise; all else is `chat`."""
_TRACE_HEADERS = ("traceparent", "tracestate")

Watch = tuple["Span | None", Token[Mapping[str, logs.Value]]]

log = logging.getLogger(__name__)


def begin(turn: Turn, headers: Mapping[bytes, bytes]) -> Watch:
    """Watch the serving of a call: every line says which, until `end`."""
    tracer = tracing.tracer()
    span = None if tracer is None else _begun(tracer, turn, headers)
    return span, logs.begin({"call": turn.id, "project": turn.project, "key": turn.key_id})


def end(watch: Watch, turn: Turn, failed: str) -> None:
    """Tell all of it; `failed`: the class of the error that its serving ended in, nothing where it did in none."""
    span, saying = watch
    try:
        if log.isEnabledFor(logging.INFO):
            _tell(turn, failed)
        if span is not None:
            _end(span, turn, turn.ended, failed)
    finally:
        logs.end(saying)


def _tell(turn: Turn, failed: str) -> None:
    ended, place = turn.ended, turn.place
    with logs.about(
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


def _begun(tracer: "Tracer", turn: Turn, headers: Mapping[bytes, bytes]) -> "Span":
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


def _end(span: "Span", turn: Turn, ended: Ended | None, failed: str) -> None:
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
