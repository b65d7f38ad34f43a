"""Answers of other servers: their tokens are counted, and past the day's money no call costs any more."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from migrations import schema
from proxy.errors import SpendingCapReached
from proxy.upstream.spending import SpendingCap
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, chunk, settings_for, wait_for
from tests.unit.proxy.dashboard.test_crawl import words
from tests.unit.proxy.dashboard.test_middleware import Person
from whetstone.config.settings import Settings

PRICES = {"usd_per_million_prompt_tokens": 1_000_000.0, "usd_per_million_completion_tokens": 1_000_000.0}
"""A dollar for each token."""
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def plain(handler: FakeHandler, body: dict[str, Any]) -> None:
    """Answer as a server that returns no ids: whole, or in a stream, with the tokens if the request asks for them."""
    if not body.get("stream"):
        choices = [
            {"index": index, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
            for index in range(body.get("n", 1))
        ]
        handler.whole(200, {"id": "x", "object": "chat.completion", "model": "g", "choices": choices, "usage": USAGE})
        return
    handler.begin()
    handler.say(chunk({"role": "assistant", "content": "Hello"}))
    handler.say(chunk({}, finish_reason="stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        handler.say(chunk(None, usage=USAGE))
    handler.say(b"data: [DONE]\n\n")
    handler.end()


@pytest.fixture
def other() -> Iterator[FakeVllm]:
    with FakeVllm(base_names=["g"]) as other:
        other.script = plain
        yield other


@pytest.fixture
def begin(
    sqlite_url: str, fake_vllm: FakeVllm, other: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> Callable[..., RunningProxy]:
    """Starts a proxy with another server, whose models are `gpt`, which costs money, `free` and `unpriced`."""

    def begin(cap: float | None = None, **values: Any) -> RunningProxy:
        server = {"url": f"{other.url}/v1"}
        upstreams: dict[str, Any] = {
            "paid": server | {"models": {"gpt": "g"}} | PRICES,
            "free": server | {"models": {"free": "g"}} | dict.fromkeys(PRICES, 0.0),
        }
        if cap is None:
            upstreams["unpriced"] = server | {"models": {"unpriced": "g"}}
        spending = {"usd_per_day": cap}
        return start(
            settings_for(sqlite_url, fake_vllm.url, tmp_path, upstreams=upstreams, spending=spending, **values)
        )

    return begin


def is_spent(proxy: RunningProxy) -> bool:
    """Wait until the proxy knows that the money is spent."""
    cap: SpendingCap = proxy.app.tenants["default"].inference._spending
    return bool(wait_for(lambda: cap.refuses("default", "gpt")))


def test_the_tokens_of_a_whole_answer_are_those_of_its_usage(begin: Callable[..., RunningProxy]) -> None:
    proxy = begin()
    for model in ("gpt", "unpriced"):
        assert proxy.chat(model=model).json()["usage"] == USAGE
        (row,) = proxy.recorded(policy=model)
        assert (row.prompt_tokens, row.completion_tokens, row.token_ids) == (5, 7, None)
    proxy.chat(model="free", n=2)
    rows = proxy.recorded(2, policy="free")
    assert [row.completion_tokens for row in rows] == [4, 3], "only their sum is known"
    (hours,) = [one for one in proxy.rows(schema.trajectories) if one.policy == "gpt"]
    assert hours.sampled_tokens == 7


def test_vllms_share_of_recorded_tokens_counts_no_other_servers(begin: Callable[..., RunningProxy]) -> None:
    proxy = begin()
    proxy.chat(model="gpt")
    proxy.chat()
    proxy.recorded(2)
    text = proxy.client.get("/metrics").text
    assert "whetstone_recorded_tokens_total 3.0" in text
    assert 'whetstone_sampled_tokens_total{policy="gpt"} 7.0' in text


@pytest.mark.parametrize(
    ("model", "options", "sent", "has_usage"),
    [
        ("gpt", None, {"include_usage": True}, False),
        ("gpt", {"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}, False),
        ("gpt", {"include_usage": True}, {"include_usage": True}, True),
        ("gpt", "wrong", "wrong", False),
        ("unpriced", None, None, False),
        ("unpriced", {"include_usage": True}, {"include_usage": True}, True),
    ],
)
def test_a_priced_stream_reports_its_tokens_and_the_app_sees_what_it_requested(
    begin: Callable[..., RunningProxy], other: FakeVllm, model: str, options: Any, sent: Any, has_usage: bool
) -> None:
    if options == "wrong":
        other.script = lambda handler, body: plain(handler, {"stream": True})
    proxy = begin()
    given = {} if options is None else {"stream_options": options}
    text = proxy.chat(model=model, stream=True, **given).text
    assert other.requests[-1].get("stream_options") == sent
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert ("usage" in chunks[-1] and not chunks[-1]["choices"]) == has_usage
    assert [one["choices"][0]["delta"].get("content") for one in chunks if one["choices"]] == ["Hello", None]
    assert text.endswith("data: [DONE]\n\n")
    (row,) = proxy.recorded(policy=model)
    counted = isinstance(sent, dict)
    assert (row.prompt_tokens, row.completion_tokens) == ((5, 7) if counted else (None, None))
    assert row.sampling.get("stream_options") == options, "the record has what the app sent"


def test_other_dialects_are_counted_too(begin: Callable[..., RunningProxy], other: FakeVllm) -> None:
    proxy, usage = begin(), {"input_tokens": 5, "output_tokens": 7}
    answer = {"id": "m", "model": "g", "content": [{"type": "text", "text": "Hi"}], "usage": usage}
    other.script = lambda handler, body: handler.whole(200, answer)
    messages = [{"role": "user", "content": "hi"}]
    proxy.client.post("/v1/messages", json={"model": "gpt", "max_tokens": 9, "messages": messages})
    choices = [{"index": index, "text": "a", "finish_reason": "stop"} for index in range(2)]
    text = {"id": "c", "object": "text_completion", "model": "g", "choices": choices, "usage": USAGE}
    other.script = lambda handler, body: handler.whole(200, text)
    proxy.client.post("/v1/completions", json={"model": "gpt", "prompt": ["one", "two"]})
    rows = proxy.recorded(3)
    assert [(row.endpoint, row.prompt_tokens, row.completion_tokens) for row in rows] == [
        ("messages", 5, 7), ("completions", 5, 7), ("completions", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("completion_tokens", [-1, 2**40, 1.5, "7", True, None])
def test_a_count_that_is_none_harms_no_answer(
    begin: Callable[..., RunningProxy], other: FakeVllm, completion_tokens: Any
) -> None:
    proxy = begin()
    usage = {"prompt_tokens": 5, "completion_tokens": completion_tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    other.script = lambda handler, body: handler.whole(200, {"id": "x", "choices": [choice], "usage": usage})
    assert proxy.chat(model="gpt").status_code == 200
    (row,) = proxy.recorded()
    assert (row.prompt_tokens, row.completion_tokens) == (5, None)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 429 and 0 < int(answer.headers["retry-after"]) <= 24 * 3600 + 1
    assert answer.headers["x-should-retry"] == "false"
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_past_the_cap_what_costs_money_is_refused_and_all_else_is_answered(
    begin: Callable[..., RunningProxy], other: FakeVllm
) -> None:
    proxy = begin(cap=12.0)
    key = {"Idempotency-Key": "k"}
    first = proxy.chat(key, model="gpt")
    assert first.status_code == 200 and is_spent(proxy)
    error = error_of(proxy.chat(model="gpt"))
    assert (error["type"], error["code"]) == ("insufficient_quota", "spending_cap_reached")
    assert "the spending cap of $12.00 a day is reached" in error["message"]
    assert "raises spending.usd_per_day" in error["message"]
    assert error_of(proxy.client.post("/v1/embeddings", json={"model": "gpt", "input": "hi"})) == error
    messages = [{"role": "user", "content": "hi"}]
    reply = proxy.client.post("/v1/messages", json={"model": "gpt", "max_tokens": 9, "messages": messages})
    assert error_of(reply) == error
    assert proxy.chat(key, model="gpt").json() == first.json(), "an answer that is stored costs nothing"
    assert [proxy.chat(model=model).status_code for model in ("free", "starter")] == [200, 200]
    assert len(other.requests) == 2, "the first call, and the free one"


def test_just_below_the_cap_nothing_is_refused(begin: Callable[..., RunningProxy]) -> None:
    proxy = begin(cap=12.5)
    proxy.chat(model="gpt")
    proxy.recorded()
    cap: SpendingCap = proxy.app.tenants["default"].inference._spending
    wait_for(lambda: cap.last is not None and cap.last.usd == 12.0)
    assert proxy.chat(model="gpt").status_code == 200


def test_past_the_cap_the_policy_answers_its_teachers_share(
    begin: Callable[..., RunningProxy], fake_vllm: FakeVllm, other: FakeVllm
) -> None:
    proxy = begin(cap=12.0, learning={"starter": {"handover": {"teacher": "gpt", "shares": [0.001]}}})
    with proxy.engine.begin() as connection:
        connection.execute(update(schema.policies).where(schema.policies.c.id == "starter").values(handover_share=0.0))
    wait_for(lambda: proxy.app.tenants["default"].policies.handover("starter").share == 0.0)
    named = {"X-Trajectory-Id": "t"}
    assert proxy.chat(named).status_code == 200 and is_spent(proxy)
    assert (len(fake_vllm.requests), len(other.requests)) == (0, 1)
    for headers in (named, {"X-Trajectory-Id": "new"}):
        assert proxy.chat(headers).status_code == 200
    assert (len(fake_vllm.requests), len(other.requests)) == (2, 1)
    assert [row.policy for row in proxy.recorded(3)] == ["gpt", "starter", "starter"]


def test_metrics_and_the_page_of_costs_show_what_is_spent(begin: Callable[..., RunningProxy]) -> None:
    proxy, person = begin(cap=12.0), None
    proxy.chat(model="gpt")
    assert is_spent(proxy)
    text = proxy.client.get("/metrics").text
    assert 'whetstone_spent_usd{of="upstreams"} 12.0' in text and 'whetstone_spent_usd{of="judges"} 0.0' in text
    assert "whetstone_spending_cap_usd 12.0" in text
    person = Person(proxy)
    page = words(person.get("/ui/keys").text)
    person.client.close()
    assert "Spent today $12.00 of $12.00 a day" in page and "gpt $12.00" in page
    assert "The spending cap is reached" in page


def test_a_cap_ends_with_its_day(sqlite_url: str, begin: Callable[..., RunningProxy]) -> None:
    proxy = begin()
    now = datetime.now(UTC)
    seed = Seed(proxy.engine)
    seed.trajectory("t", policy="gpt", turns=0, created_at=now)
    seed.completion("t", 0, policy="gpt", created_at=now, prompt_tokens=20, completion_tokens=20)
    settings = proxy.settings.model_copy(update={"spending": Settings(spending={"usd_per_day": 40.0}).spending})  # type: ignore[arg-type]
    clock = [now]
    cap = SpendingCap(proxy.engine, settings, lambda: clock[0])
    assert not cap.refuses("default", "gpt"), "nothing is known yet"
    cap.last = cap._read()
    with pytest.raises(SpendingCapReached, match="'gpt' is answered by another server"):
        cap.check("default", "gpt")
    for policy in ("free", "unpriced", "starter"):
        cap.check("default", policy)
    clock[0] = now + timedelta(days=1)
    cap.check("default", "gpt")
