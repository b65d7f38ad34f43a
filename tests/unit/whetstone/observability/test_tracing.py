"""Where spans go: a collector, a Langfuse, both or nobody. Against a receiver that reads OTLP by its own definition."""

import base64
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.fakes.json_server import Handler, Server
from whetstone.config.settings import LANGFUSE_VARIABLES, LogSettings, SettingsError, load
from whetstone.observability import tracing


class Receiver(Server):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str | None, ExportTraceServiceRequest]] = []
        """Path, Authorization and what was sent."""
        super().__init__(Receiving)

    @property
    def spans(self) -> list[str]:
        """Names of the spans."""
        scopes = (scope for _, _, one in self.told for of in one.resource_spans for scope in of.scope_spans)
        return [span.name for scope in scopes for span in scope.spans]


class Receiving(Handler):
    server: Receiver

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.server.told.append((self.path, self.headers.get("authorization"), request))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        yield one


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*LANGFUSE_VARIABLES, *tracing.ENDPOINT_VARIABLES, "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    yield
    tracing.stop()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in zip(LANGFUSE_VARIABLES, ("pk-lf-1", "sk-lf-2"), strict=True):
        monkeypatch.setenv(name, value)
    return "Basic " + base64.b64encode(b"pk-lf-1:sk-lf-2").decode()


def one_span(settings: LogSettings) -> None:
    tracing.start(settings, "tests")
    with tracing.span("step", {"whetstone.policy": "starter"}):
        pass
    tracing.stop()


def test_a_langfuse_gets_spans_where_it_takes_otlp_with_its_keys(receiver: Receiver, keys: str) -> None:
    one_span(LogSettings(langfuse_url=receiver.url))
    assert [(path, key) for path, key, _ in receiver.told] == [("/api/public/otel/v1/traces", keys)]
    assert receiver.spans == ["step"]


def test_a_collector_gets_them_without_anybodys_key(receiver: Receiver, keys: str) -> None:
    one_span(LogSettings(otlp_endpoint=receiver.url + "/"))
    assert [(path, key) for path, key, _ in receiver.told] == [("/v1/traces", None)]


def test_both_get_each_span_once(receiver: Receiver, keys: str) -> None:
    one_span(LogSettings(otlp_endpoint=receiver.url, langfuse_url=receiver.url))
    assert sorted(path for path, _, _ in receiver.told) == ["/api/public/otel/v1/traces", "/v1/traces"]
    assert receiver.spans == ["step", "step"]


def test_off_by_default_and_off_by_opentelemetrys_own_word(
    receiver: Receiver, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_span(LogSettings())
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    one_span(LogSettings(otlp_endpoint=receiver.url, langfuse_url=receiver.url))
    assert receiver.told == []


def test_a_langfuse_without_keys_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LANGFUSE_VARIABLES[0], "pk-lf-1")
    with pytest.raises(SettingsError, match="LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY"):
        tracing.start(LogSettings(langfuse_url="https://langfuse.example.com"), "tests")
    assert tracing.tracer() is None


def test_an_address_holds_no_key() -> None:
    with pytest.raises(SettingsError, match=r"langfuse_url"):
        load(environment={"WHETSTONE_LOG__LANGFUSE_URL": "https://pk:sk@langfuse.example.com"})
