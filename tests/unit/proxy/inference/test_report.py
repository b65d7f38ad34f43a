"""A call as those who watch see it: its line in the log, its span, and that neither tells what was said."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.proxy.conftest import FakeVllm, RunningProxy, wait_for

Lines = Callable[[], list[dict[str, Any]]]
APP = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A `traceparent`, as W3C's recommendation has it."""
SAID, HEARD = "a word nobody else is to read", "Hello"


def told(logged: Lines) -> list[dict[str, Any]]:
    """The lines up to that of a call, which is written after its last byte."""
    lines: list[dict[str, Any]] = []

    def there() -> bool:
        lines.extend(logged())
        return any(line["logger"] == "proxy.inference.access_log" for line in lines)

    wait_for(there)
    return lines


def line_of_call(logged: Lines) -> dict[str, Any]:
    (line,) = [line for line in told(logged) if line["logger"] == "proxy.inference.access_log"]
    return line


def span_of(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = wait_for(spans.get_finished_spans)
    return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_call_is_one_line_that_says_which(logged: Lines, plain_proxy: RunningProxy) -> None:
    answer = plain_proxy.chat({"x-group-id": "g1", "x-request-id": "gateway:7"})
    call, trajectory = answer.headers["x-completion-id"], answer.headers["x-trajectory-id"]
    line = line_of_call(logged)
    assert line["message"].startswith("complete in ") and line["message"].endswith(": 3 tokens in, 3 out")
    assert line | {"time": "", "message": ""} == {
        "time": "", "level": "INFO", "logger": "proxy.inference.access_log", "message": "", "call": call,
        "request": "gateway:7",
        "project": "default", "trajectory": trajectory, "group": "g1", "version": "starter@v0",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/nowhere", "/healthz"])
def test_a_request_id_is_returned_whatever_is_answered(door: RunningProxy, path: str) -> None:
    assert door.client.post(path, json={}, headers={"x-request-id": "abc.1"}).headers["x-request-id"] == "abc.1"


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "<script>", "ä"])
def test_what_is_no_id_is_left_alone(door: RunningProxy, sent: str) -> None:
    answer = door.client.get("/healthz", headers={"x-request-id": sent.encode("latin-1")})
    assert answer.status_code == 200 and "x-request-id" not in answer.headers


def test_a_call_is_one_span_by_the_conventions(
    spans: InMemorySpanExporter, plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    answer = plain_proxy.chat({"x-group-id": "g1"})
    span = span_of(spans)
    assert (span.name, span.kind, span.parent) == ("chat starter", SpanKind.CLIENT, None)
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "starter",
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "starter@v0",
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.conversation.id": answer.headers["x-trajectory-id"],
        "server.address": "127.0.0.1",
        "server.port": int(fake_vllm.url.rsplit(":", 1)[1]),
        "whetstone.project": "default",
        "whetstone.call.id": answer.headers["x-completion-id"],
        "whetstone.completion.id": answer.headers["x-completion-id"],
        "whetstone.trajectory.id": answer.headers["x-trajectory-id"],
        "session.id": answer.headers["x-trajectory-id"],
        "whetstone.group.id": "g1",
    }
    assert span.status.status_code is StatusCode.UNSET


def test_a_streams_span_lasts_to_its_last_byte_and_tells_its_first_token(
    spans: InMemorySpanExporter, plain_proxy: RunningProxy
) -> None:
    plain_proxy.chat(stream=True)
    span = span_of(spans)
    (first,) = span.events
    assert span.start_time is not None and span.end_time is not None
    assert first.name == "first token" and span.start_time <= first.timestamp <= span.end_time
    ttft_s = attributes(span)["gen_ai.response.time_to_first_chunk"]
    assert ttft_s == pytest.approx((first.timestamp - span.start_time) / 1e9, abs=1e-5)


def test_the_apps_trace_goes_on_here_and_ours_at_vllm(
    spans: InMemorySpanExporter, plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    plain_proxy.chat({"traceparent": APP, "tracestate": "vendor=1"})
    span = span_of(spans)
    assert span.context is not None and span.parent is not None
    trace, parent = f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}"
    assert f"00-{trace}-{parent}-01" == APP
    sent = fake_vllm.headers[-1]
    assert (sent["traceparent"], sent["tracestate"]) == (f"00-{trace}-{span.context.span_id:016x}-01", "vendor=1")


@pytest.mark.parametrize("broken", ["", "00-zz-b7ad6b7169203331-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_trace_that_is_none_is_begun_anew(
    spans: InMemorySpanExporter, plain_proxy: RunningProxy, broken: str
) -> None:
    assert plain_proxy.chat({"traceparent": broken}).status_code == 200
    assert span_of(spans).parent is None


def test_where_nothing_is_traced_nothing_is_passed_on(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    plain_proxy.chat({"traceparent": APP})
    assert "traceparent" not in fake_vllm.headers[-1]


def test_a_call_that_breaks_off_ends_its_span_in_an_error_without_its_words(
    spans: InMemorySpanExporter, logged: Lines, plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    fake_vllm.script = lambda handler, _body: handler.whole(
        400, {"error": {"message": f"cannot read {SAID}", "type": "BadRequestError", "code": 400}}
    )
    assert SAID in plain_proxy.chat(messages=[{"role": "user", "content": SAID}]).text
    span = span_of(spans)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)
    assert attributes(span)["error.type"] == "error"
    assert line_of_call(logged)["message"].startswith("error in ")


def test_a_text_completion_is_called_what_the_conventions_call_it(
    spans: InMemorySpanExporter, plain_proxy: RunningProxy
) -> None:
    plain_proxy.client.post("/v1/completions", json={"model": "starter", "prompt": "hi"})
    assert attributes(span_of(spans))["gen_ai.operation.name"] == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_neither_log_nor_span_tells_what_was_said(
    spans: InMemorySpanExporter, logged: Lines, plain_proxy: RunningProxy, stream: bool
) -> None:
    key = "sk-" + "k" * 20
    plain_proxy.chat({"authorization": f"Bearer {key}"}, messages=[{"role": "user", "content": SAID}], stream=stream)
    plain_proxy.recorded()
    everything = json.dumps(told(logged)) + span_of(spans).to_json()
    assert [word for word in (SAID, HEARD, key) if word in everything] == []


def test_tokens_that_a_server_does_not_count_are_not_counted_as_none(
    logged: Lines, plain_proxy: RunningProxy, fake_vllm: FakeVllm
) -> None:
    fake_vllm.script = lambda handler, _body: handler.hang_up()
    assert plain_proxy.chat().status_code == 503
    assert line_of_call(logged)["message"].endswith(": ? tokens in, ? out")
