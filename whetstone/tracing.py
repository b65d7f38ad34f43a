"""Traces by OpenTelemetry: spans of calls, judgements and steps, where somebody collects them. Knows no content.

Names follow the semantic conventions for generative AI (github.com/open-telemetry/semantic-conventions-genai, in
development; as of late 2026). Off unless `log.otlp_endpoint` or OTEL_EXPORTER_OTLP_ENDPOINT names a collector: then
`tracer()` is None, and that is all it costs. The packages are the extra `tracing`; vLLM brings them along. A Langfuse
(`log.langfuse_url`) is one more collector, that asks for a key.
"""

import base64
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from whetstone import __version__
from whetstone.settings import LANGFUSE_VARIABLES, LogSettings, SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""What OpenTelemetry itself goes by."""
PROJECT, CALL, GROUP = "whetstone.project", "whetstone.call.id", "whetstone.group.id"
"""Our own attributes, beside those of the conventions."""
TRAJECTORIES, GROUPS = "whetstone.trajectory.ids", "whetstone.group.ids"
"""By these, judgements and steps are found from a call: its `gen_ai.conversation.id` is its trajectory."""
LANGFUSE_PATH = "/api/public/otel/v1/traces"
MOST_IDS = 64
"""Ids in one attribute; a step may take thousands of trajectories."""

Value = str | bool | int | float | Sequence[str] | None
Kind = Literal["internal", "client"]

log = logging.getLogger(__name__)


class _Tracing:
    provider: "TracerProvider | None" = None
    tracer: "Tracer | None" = None


def start(settings: LogSettings, service: str, exporter: "SpanExporter | None" = None) -> None:
    """Trace from now on what this process does as `whetstone-<service>`, if a collector is named.

    `exporter`: told each span at once, in the place of a collector.

    Raises:
        SettingsError: a collector is named and OpenTelemetry is not installed, or a Langfuse and its keys are not set.
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
    # One of our own, and not the process's: what libraries trace of themselves may hold what apps said.
    provider = TracerProvider(resource=Resource.create({"service.name": f"whetstone-{service}"}))
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    elif _collected(settings):
        endpoint = settings.otlp_endpoint
        collector = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        provider.add_span_processor(BatchSpanProcessor(collector))
    if exporter is None and settings.langfuse_url is not None:
        headers = _langfuse_headers(os.environ)
        langfuse = OTLPSpanExporter(endpoint=settings.langfuse_url.rstrip("/") + LANGFUSE_PATH, headers=headers)
        provider.add_span_processor(BatchSpanProcessor(langfuse))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer("whetstone", __version__)


def stop() -> None:
    """Trace nothing any more; what is traced already is sent."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
    _Tracing.provider = _Tracing.tracer = None


def tracer() -> "Tracer | None":
    """What makes spans; None while nothing is traced."""
    return _Tracing.tracer


@contextmanager
def span(name: str, attributes: Mapping[str, Value], kind: Kind = "internal") -> Iterator["Span | None"]:
    """A span around what is done inside, part of the one that this is inside of; None while nothing is traced.

    An error ends it with its class, never with its message.
    """
    if _Tracing.tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    with _Tracing.tracer.start_as_current_span(
        name, kind=SpanKind[kind.upper()], record_exception=False, set_status_on_exception=False
    ) as opened:
        told(opened, attributes)
        try:
            yield opened
        except BaseException as error:
            failed(opened, type(error).__name__)
            raise


def tell(attributes: Mapping[str, Value]) -> None:
    """Say of the span that this is inside of what is known by now."""
    if _Tracing.tracer is not None:
        from opentelemetry.trace import get_current_span

        told(get_current_span(), attributes)


def told(span: "Span", attributes: Mapping[str, Value]) -> None:
    """Say of a span what is known; of long lists the beginning."""
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, value if isinstance(value, str | bool | int | float) else [*value][:MOST_IDS])


def failed(span: "Span", kind: str) -> None:
    """Say of a span that it ended in an error of this kind."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


def _wanted(settings: LogSettings) -> bool:
    if os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return settings.langfuse_url is not None or _collected(settings)


def _collected(settings: LogSettings) -> bool:
    """Whether somebody names a collector, the settings or OpenTelemetry's own variables."""
    return settings.otlp_endpoint is not None or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def _langfuse_headers(environment: Mapping[str, str]) -> dict[str, str]:
    public, secret = (environment.get(name, "") for name in LANGFUSE_VARIABLES)
    if not public or not secret:
        raise SettingsError(f"log.langfuse_url needs its keys in the environment: {' and '.join(LANGFUSE_VARIABLES)}")
    return {"authorization": "Basic " + base64.b64encode(f"{public}:{secret}".encode()).decode()}
