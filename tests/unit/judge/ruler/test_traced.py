"""A ranking as those who watch see it: its spans and its lines say which group, and nothing that was said."""

import json

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.judge.ruler.speaker import failure

pytestmark = pytest.mark.slow


def named(spans, name):
    return [one for one in spans.get_finished_spans() if one.name == name]


def test_a_ranking_is_a_span_with_its_trajectories_and_a_span_for_each_call(court, spans, logged):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    (ranking,) = named(spans, "rank group")
    assert dict(ranking.attributes) == {
        "whetstone.project": "default",
        "whetstone.group.id": "g",
        "whetstone.trajectory.ids": ("g0", "g1"),
    }
    calls = named(spans, "chat openai/scripted")
    assert len(calls) == court.server.calls > 0
    for call in calls:
        told = dict(call.attributes)
        assert (call.kind, call.parent.span_id) == (SpanKind.CLIENT, ranking.context.span_id)
        assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.provider.name"] == "openai"
        assert told["gen_ai.usage.input_tokens"] > 0 and told["gen_ai.usage.output_tokens"] > 0
    scored = [line for line in logged() if line["logger"] == "judge.settlement.sweep"]
    assert [(one["message"], one["group"], one["trajectories"]) for one in scored] == [("scored", "g", ["g0", "g1"])]


def test_a_judge_that_quotes_the_prompt_is_quoted_in_no_log_and_no_span(court, speaker, spans, logged):
    court.named("local", f"{speaker.server.url}/v1")
    speaker.says((429, failure("try 0 is worth too much", "rate_limit"), {"Retry-After": "600"}))
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert "try 0 is worth" in court.state().judge_waits
    told = json.dumps(logged()) + "".join(one.to_json() for one in spans.get_finished_spans())
    assert "not ranked yet" in told and "is worth" not in told
    assert {one.status.status_code for one in named(spans, "chat openai/scripted")} == {StatusCode.ERROR}
