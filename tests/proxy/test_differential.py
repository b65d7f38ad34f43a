"""Generated requests, through the proxy and straight to a real vLLM that has a tool and a reasoning parser.

The app must not be able to tell the two answers apart, and what is recorded must be what was said. The requests are
the same in every run. They are sent one at a time: neighbours in a batch would move samples and join events.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from tokenizers import Tokenizer

from tests.proxy.conftest import RunningProxy, settings_for, wait_for
from tests.proxy.generated import Body, chats, completions, wrong_chats, wrong_completions
from tests.proxy.same import Answer, masked, same

pytestmark = pytest.mark.stack

SERVED = "starter@v0"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, tuple[str, SearchStrategy[Body], int]] = {
    "plain chats": (CHAT, chats(stream=False), 200),
    "streamed chats": (CHAT, chats(stream=True), 250),
    "wrong chats": (CHAT, wrong_chats(), 150),
    "plain completions": (TEXT, completions(stream=False), 100),
    "streamed completions": (TEXT, completions(stream=True), 150),
    "wrong completions": (TEXT, wrong_completions(), 100),
}
"""Where to, what, and how many."""

ATTEMPTS = 10
"""How often both are asked until they say the same: a busy vLLM joins the tokens of an event as it comes."""

REFUSED = ("request_id", "cache_salt", "priority")
"""Fields of vLLM's that the proxy refuses and the generator makes."""


class Both:
    """The proxy and the vLLM behind it."""

    def __init__(self, proxy: RunningProxy, vllm_url: str) -> None:
        self.proxy = proxy
        self.alone = httpx.Client(base_url=vllm_url, timeout=120, trust_env=False)

    def ask(self, path: str, body: Body) -> httpx.Response:
        """Ask both; their answers are the same, or the proxy refuses what it promises to. Returns the proxy's."""
        if _is_refused(body):
            response = self.proxy.client.post(path, json=body)
            assert response.status_code in (400, 404)
            assert response.json()["error"]["message"]
            return response
        for _ in range(ATTEMPTS):
            response = self.proxy.client.post(path, json=body)
            alone = self.alone.post(path, json=body | {"model": SERVED})
            through, expected = masked(response, body["model"]), masked(alone, SERVED)
            if _prompts(body) > 1:
                # vLLM serves each prompt on its own; whose token comes first is a matter of chance.
                through, expected = through.by_choice(), expected.by_choice()
            if same(through, expected):
                break
        assert through == expected or same(through, expected)
        return response


@pytest.fixture(scope="module")
def both(
    parsing_vllm_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    data = tmp_path_factory.mktemp("both")
    (data / "whetstone.db").write_bytes(sqlite_template.read_bytes())
    both = Both(
        RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", parsing_vllm_url, data)), parsing_vllm_url
    )
    yield both
    both.alone.close()
    both.proxy.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(Settings().model) / "tokenizer.json"))


@pytest.mark.parametrize("kind", REQUESTS)
def test_an_answer_is_that_of_vllm_alone(both: Both, tokenizer: Tokenizer, kind: str) -> None:
    path, bodies, count = REQUESTS[kind]
    asked: list[tuple[Body, httpx.Response]] = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def each(body: Body) -> None:
        asked.append((body, both.ask(path, body)))

    each()
    assert len(asked) >= count
    answered = [(body, response) for body, response in asked if response.is_success]
    assert bool(answered)
    for body, response in answered:
        check_records(both.proxy, tokenizer, body, response)


def test_they_are_at_least_five_hundred() -> None:
    assert sum(count for _, _, count in REQUESTS.values()) >= 500


def check_records(proxy: RunningProxy, tokenizer: Tokenizer, body: Body, response: httpx.Response) -> None:
    """Every choice is recorded as it was said: with its ids and logprobs, or with the reason why not."""
    said = _said(response)
    rows = proxy.recorded(len(said.texts), upstream_id=said.id)
    assert {row.choice: (row.response_text or "", row.finish_reason) for row in rows} == said.choices
    for row in rows:
        assert (row.status, row.policy_version) == ("complete", 0)
        if row.token_ids is None or row.inference_logprobs is None:
            assert row.why_not_trained is not None
            continue
        assert len(row.token_ids) == len(row.inference_logprobs) == row.completion_tokens > 0
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.inference_logprobs)
def _is_refused(body: Body) -> bool:
    return body.get("model") not in MODELS or any(name in body for name in REFUSED)


def _prompts(body: Body) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
