"""Trace calls, judgements and steps with OpenTelemetry, if a collector is configured.

Span names follow the semantic conventions for generative AI (github.com/open-telemetry/semantic-conventions-genai, in
development; as of late 2026). Spans contain no content of calls. Tracing is off unless `log.otlp_endpoint` or
OTEL_EXPORTER_OTLP_ENDPOINT names a collector: then `tracer()` is None, at no other cost. The packages are the extra
`tracing`; vLLM installs them too. A Langfuse server (`log.langfuse_url`) is another collector, which requires a key.
"""

import base64
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from whetstone import __version__
from whetstone.config.settings import LANGFUSE_VARIABLES, LogSettings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that OpenTelemetry itself reads."""
PROJECT, CALL, GROUP = "whetstone.project", "whetstone.call.id", "whetstone.group.id"
"""Our own attributes, besides those of the conventions."""
COMPLETION, TRAJECTORY = "whetstone.completion.id", "whetstone.trajectory.id"
"""A call's ids under the names that feedback, SQL and the dashboard use. The first is `X-Completion-Id`."""
SESSION = "session.id"
"""By this attribute Langfuse and Phoenix join the spans of a conversation; it is the trajectory."""
TRAJECTORIES, GROUPS = "whetstone.trajectory.ids", "whetstone.group.ids"
"""Attributes that link judgements and steps to a call: the call's `gen_ai.conversation.id` is its trajectory."""
LANGFUSE_PATH = "/api/public/otel/v1/traces"
MOST_IDS = 64
"""Most ids in one attribute; a step may take thousands of trajectories."""

Value = str | bool | int | float | Sequence[str] | None
Kind = Literal["internal", "client"]

log = logging.getLogger(__name__)


class _Tracing:
    provider: "TracerProvider | None" = None
    tracer: "Tracer | None" = None


def start(settings: LogSettings, service: str, exporter: "SpanExporter | None" = None) -> None:
    """Start tracing what this process does, as `whetstone-<service>`, if a collector is configured.

    `exporter`: receives each span at once, in place of a collector.

    Raises:
        SettingsError: a collector is set and OpenTelemetry is not installed, or Langfuse is set without its keys.
    """
    if exporter is None and not _wanted(settings):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError as error:
        if settings.otlp_endpoint is None and settings.langfuse_url is None:
            log.warning("%s is set, but OpenTelemetry is not installed: nothing is traced", ENDPOINT_VARIABLES[1])
            return
        raise SettingsError(
            "log.otlp_endpoint and log.langfuse_url need OpenTelemetry, which is not installed: "
            "pip install -e '.[tracing]' in the repository"
        ) from error
    # A provider of our own, not the global one: spans that libraries create may contain the content of calls.
    provider = TracerProvider(resource=Resource.create({"service.name": f"whetstone-{service}"}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    elif _collected(settings):
        endpoint = settings.otlp_endpoint
        collector = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        provider.add_span_processor(BatchSpanProcessor(collector))
    if exporter is None and settings.langfuse_url is not None:
        public, secret = (os.environ.get(name, "") for name in LANGFUSE_VARIABLES)
        if not public or not secret:
            raise SettingsError(
                f"log.langfuse_url needs its keys in the environment: {' and '.join(LANGFUSE_VARIABLES)}"
            )
        headers = {"authorization": "Basic " + base64.b64encode(f"{public}:{secret}".encode()).decode()}
        langfuse = OTLPSpanExporter(endpoint=settings.langfuse_url.rstrip("/") + LANGFUSE_PATH, headers=headers)
        provider.add_span_processor(BatchSpanProcessor(langfuse))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer("whetstone", __version__)


def stop() -> None:
    """Stop tracing; pending spans are sent."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
    _Tracing.provider = _Tracing.tracer = None


def tracer() -> "Tracer | None":
    """Return the tracer; None while tracing is off."""
    return _Tracing.tracer


@contextmanager
def span(name: str, attributes: Mapping[str, Value], kind: Kind = "internal") -> Iterator["Span | None"]:
    """Open a span, a child of the current one, around the block; yields None while tracing is off.

    An error ends the span with the error's class, never with its message.
    """
    if _Tracing.tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    with _Tracing.tracer.start_as_current_span(
        name, kind=SpanKind[kind.upper()], record_exception=False, set_status_on_exception=False
    ) as opened:
        set_attributes(opened, attributes)
        try:
            yield opened
        except BaseException as error:
            failed(opened, type(error).__name__)
            raise


def tell(attributes: Mapping[str, Value]) -> None:
    """Set attributes on the current span."""
    if _Tracing.tracer is not None:
        from opentelemetry.trace import get_current_span

        set_attributes(get_current_span(), attributes)


def set_attributes(span: "Span", attributes: Mapping[str, Value]) -> None:
    """Set attributes on a span, except None values; lists are cut to MOST_IDS."""
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value if isinstance(value, str | bool | int | float) else [*value][:MOST_IDS])


def failed(span: "Span", kind: str) -> None:
    """Mark a span as failed with this kind of error."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _wanted(settings: LogSettings) -> bool:
    is_off = os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not is_off and (settings.langfuse_url is not None or _collected(settings))


def _collected(settings: LogSettings) -> bool:
    """Whether a collector is set, in the settings or in OpenTelemetry's own variables."""
    return settings.otlp_endpoint is not None or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
