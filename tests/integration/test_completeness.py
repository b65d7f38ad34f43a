"""Every token that vLLM sampled is in SQL: counted by vLLM on one side and by the database on the other."""

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from migrations import schema
from proxy.metrics.vllm import Completeness
from proxy.recording.store import Store
from proxy.upstream.server import Upstream
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, wait_for
from whetstone.database.engine import connect
from whetstone.registry.projects import Store as CommandLineStore
from whetstone.vllm.client import Vllm

MESSAGES = [{"role": "user", "content": "hi"}]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "stream": True, "n": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "stop": ["e", "a", "1"]}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 12}),
    ("/v1/completions", {"prompt": ["hi", "a longer one"], "max_tokens": 12, "n": 2, "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 12}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 12, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 12}),
]


def completeness(proxy: RunningProxy) -> float | None:
    """As `/metrics` tells it, once everything is written."""
    wait_for(lambda: metric(proxy, "whetstone_unwritten_calls") == 0)
    return metric(proxy, "whetstone_capture_completeness")


def metric(proxy: RunningProxy, name: str) -> float | None:
    lines = proxy.client.get("/metrics").text.splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)


@pytest.mark.stack
def test_every_sampled_token_is_recorded(real_proxy: RunningProxy, vllm_url: str) -> None:
    assert metric(real_proxy, "whetstone_capture_completeness") is None, "nothing was sampled yet"
    for path, values in KINDS:
        response = real_proxy.client.post(path, json={"model": "starter", "temperature": 1} | values)
        assert response.status_code == 200, response.text
        assert completeness(real_proxy) == 1.0, (path, values)
    c = schema.completions.c
    with real_proxy.engine.connect() as connection:
        recorded = connection.execute(select(func.sum(c.completion_tokens))).scalar_one()
    assert metric(real_proxy, "whetstone_recorded_tokens_total") == recorded > len(KINDS)

    past_us = {"model": "starter@v0", "messages": MESSAGES, "max_tokens": 12}
    httpx.post(f"{vllm_url}/v1/chat/completions", json=past_us, trust_env=False, verify=False).raise_for_status()
    share = completeness(real_proxy)
    assert share is not None and share < 1.0


@pytest.mark.stack
def test_what_up_samples_to_see_whether_vllm_lives_is_no_apps(real_proxy: RunningProxy, vllm_url: str) -> None:
    control = Vllm(vllm_url)
    assert control.alive("starter@v0") is True
    assert control.probed_tokens == 1
    CommandLineStore(real_proxy.engine).count_probe(real_proxy.settings, control.probed_tokens)
    control.close()
    assert completeness(real_proxy) == 1.0


def test_without_vllms_count_no_share_is_reported(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> None:
    plain_proxy.chat()
    plain_proxy.recorded()
    assert completeness(plain_proxy) is None
    fake_vllm.close()
    assert metric(plain_proxy, "whetstone_recorded_tokens_total") == 3


def test_of_several_servers_the_sum_counts_and_each_may_start_again(sqlite_url: str) -> None:
    engine = connect(sqlite_url)
    store = Store(engine)

    async def shares(one: FakeVllm, other: FakeVllm) -> None:
        servers = {fake.url: Upstream(fake.url + "/v1", 10) for fake in (one, other)}
        written = 0
        counted = Completeness(servers, store, ["default"], lambda: written)
        one.generated, other.generated = 100, 50
        await counted.share()
        one.generated, other.generated = 106, 54
        written = 10
        assert await counted.share() == 1.0
        one.generated = 4  # it was started again
        written = 14
        assert await counted.share() == 1.0
        other.close()
        one.generated = 8
        written = 16
        assert await counted.share() == 16 / 18, "one that is away reports no more, and its earlier count stays"
        for server in servers.values():
            await server.close()

    with FakeVllm() as one, FakeVllm() as other:
        asyncio.run(shares(one, other))
    engine.dispose()
