"""Generated requests, through the proxy and straight to a real vLLM that has a tool and a reasoning parser.

The app must not be able to tell the two answers apart, and the record must match the answer. The requests are
the same in every run. They are sent one at a time: neighbours in a batch move samples and join events.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from tokenizers import Tokenizer

from tests.unit.proxy.both import SERVED, Both, prompts
from tests.unit.proxy.conftest import RunningProxy, settings_for
from tests.unit.proxy.generated import (
    CHAT_FEATURES,
    TEXT_FEATURES,
    Body,
    chats,
    completions,
    wrong_chats,
    wrong_completions,
)
from tests.unit.proxy.wrong_values import WRONG_IN_CHATS, WRONG_IN_COMPLETIONS
from whetstone.config.settings import Settings

pytestmark = pytest.mark.stack

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EXAMPLES = 6
"""Requests of each feature, streamed and plain each, in `make test-all`; `make test` sends one."""
WRONG_EXAMPLES = 2
"""Requests with each wrong value, where there are several of each feature."""

ORDINARY = frozenset(
    {"model", "messages", "prompt", "max_tokens", "temperature", "seed", "n", "stop", "stream", "stream_options"}
)  # fmt: skip
"""Fields that leave nothing in the way of training."""


@pytest.fixture(scope="module")
def both(parsing_vllm_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    data = tmp_path_factory.mktemp("both")
    (data / "whetstone.db").write_bytes(sqlite_template.read_bytes())
    proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", parsing_vllm_url, data))
    both = Both(proxy, parsing_vllm_url)
    yield both
    both.close()
    proxy.stop()


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """How many requests of each feature are sent."""
    return int(request.config.getoption("--examples"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(Settings().model) / "tokenizer.json"))


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("feature", CHAT_FEATURES)
def test_a_chat_is_that_of_vllm_alone(
    both: Both, tokenizer: Tokenizer, feature: str, stream: bool, examples: int
) -> None:
    compare(both, tokenizer, CHAT, chats(feature, stream), examples)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("feature", TEXT_FEATURES)
def test_a_completion_is_that_of_vllm_alone(
    both: Both, tokenizer: Tokenizer, feature: str, stream: bool, examples: int
) -> None:
    compare(both, tokenizer, TEXT, completions(feature, stream), examples)


@pytest.mark.parametrize("field", WRONG_IN_CHATS)
def test_a_wrong_chat_is_answered_as_by_vllm_alone(both: Both, tokenizer: Tokenizer, field: str, examples: int) -> None:
    for value in WRONG_IN_CHATS[field]:
        compare(both, tokenizer, CHAT, wrong_chats(field, value), min(examples, WRONG_EXAMPLES))


@pytest.mark.parametrize("field", WRONG_IN_COMPLETIONS)
def test_a_wrong_completion_is_answered_as_by_vllm_alone(
    both: Both, tokenizer: Tokenizer, field: str, examples: int
) -> None:
    for value in WRONG_IN_COMPLETIONS[field]:
        compare(both, tokenizer, TEXT, wrong_completions(field, value), min(examples, WRONG_EXAMPLES))


def test_they_are_five_hundred_and_more() -> None:
    wrong = sum(len(values) for fields in (WRONG_IN_CHATS, WRONG_IN_COMPLETIONS) for values in fields.values())
    assert 2 * EXAMPLES * (len(CHAT_FEATURES) + len(TEXT_FEATURES)) >= 500
    assert WRONG_EXAMPLES * wrong >= 500


def test_a_request_that_vllm_fails_at_does_not_harm_the_next(both: Both) -> None:
    """vLLM closes the connection after it, and does not say so."""
    body = {"model": SERVED, "prompt": "hi", "max_tokens": 1}
    for _ in range(20):
        assert both.ask(TEXT, body | {"structured_outputs": "x"}).status_code == 500
        assert both.ask(TEXT, body | {"temperature": 0}).status_code == 200


def compare(both: Both, tokenizer: Tokenizer, path: str, bodies: SearchStrategy[Body], count: int) -> None:
    """Ask for so many of them; every answer is that of vLLM alone, and recorded as it was sent."""
    answers: list[tuple[Body, httpx.Response]] = []

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(bodies)
    def ask(body: Body) -> None:
        answers.append((body, both.ask(path, body)))

    ask()
    assert len(answers) >= count
    for body, response in answers:
        if answer := _answer_of(response):
            _check_records(both.proxy, tokenizer, body, answer)


class Answer(NamedTuple):
    """The content of an answer."""

    id: str
    choices: dict[int, tuple[str, str, str]]
    """By number: text, reasoning and finish reason."""
    usage: dict[str, Any] | None


def _answer_of(response: httpx.Response) -> Answer | None:
    """None for an error, also one within a stream."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line and line != "data: [DONE]"]
    pieces = [json.loads(event) for event in events]
    if any("error" in piece for piece in pieces):
        return None
    choices: dict[int, tuple[str, str, str]] = {}
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        text, reasoning, _ = choices.get(choice["index"], ("", "", ""))
        text, reasoning = text + (part.get("content") or ""), reasoning + (part.get("reasoning") or "")
        choices[choice["index"]] = (_stored(text), _stored(reasoning), choice["finish_reason"])
    return Answer(pieces[0]["id"], choices, pieces[-1].get("usage"))


def _check_records(proxy: RunningProxy, tokenizer: Tokenizer, body: Body, answer: Answer) -> None:
    """Every choice is recorded as it was sent: with its ids and logprobs, or with the reason why not."""
    rows = proxy.recorded(len(answer.choices), upstream_id=answer.id)
    # What an app hides from itself is recorded.
    hidden = body.get("include_reasoning") is False
    recorded = {
        row.choice: (row.response_text or "", "" if hidden else row.response.get("reasoning", ""), row.finish_reason)
        for row in rows
    }
    assert recorded == answer.choices, body
    for row in rows:
        assert (row.status, row.policy_version) == ("complete", 0)
        if body.keys() <= ORDINARY and body["temperature"] in (0, 1):
            assert row.why_not_trained == (None if body["temperature"] else "greedy"), body
        assert row.why_not_trained is not None or (row.token_ids and row.inference_logprobs), body
        if row.token_ids is None or row.inference_logprobs is None:
            continue
        assert len(row.token_ids) == len(row.inference_logprobs) == row.completion_tokens, body
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.inference_logprobs), body
        _check_text(tokenizer, body, row)
    if answer.usage and all(row.token_ids for row in rows):
        assert answer.usage["completion_tokens"] == sum(row.completion_tokens for row in rows), body
        if prompts(body) == 1:
            assert {answer.usage["prompt_tokens"]} == {row.prompt_tokens for row in rows}, body
            assert rows[0].prompt_tokens == len(rows[0].prompt_token_ids), body


def _check_text(tokenizer: Tokenizer, body: Body, row: Any) -> None:
    """The ids are those of the text, less what a stop cut off, and those of the prompt.

    Not where a parser or a template came between, nor where the prompt was cut short.
    """
    if row.endpoint != "completions" or "truncate_prompt_tokens" in body:
        return
    prompt = row.new_messages[0]["prompt"]
    if not isinstance(prompt, str):
        # It may end within a character that the answer then makes whole.
        assert row.prompt_token_ids == prompt, body
        return
    assert _stored(tokenizer.decode(row.prompt_token_ids, skip_special_tokens=False)) == prompt, body
    whole = _stored(tokenizer.decode(row.token_ids, skip_special_tokens=body.get("skip_special_tokens", True)))
    # vLLM holds back the bytes of a character that never became whole.
    whole, text = whole.rstrip("\ufffd"), row.response_text.rstrip("\ufffd")
    assert whole == text if row.finish_reason == "length" else whole.startswith(text), (body, whole, text)


def _stored(text: str) -> str:
    """As SQL holds it: PostgreSQL has no NUL."""
    return text.replace("\0", "\ufffd")
