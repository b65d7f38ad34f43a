import json
from typing import Any

import pytest

from proxy.wire.chat.request import ChatRequest
from proxy.wire.interfaces import UNREADABLE, Answer
from proxy.wire.request_body import read_body
from tests.unit.proxy.conftest import ANSWER_IDS, LOGPROBS, PROMPT_IDS, answer


def read(body: dict[str, Any], **options: Any) -> Answer:
    return read_bytes(json.dumps(body).encode(), **options)


def read_bytes(body: bytes, **options: Any) -> Answer:
    return ChatRequest(read_body(json.dumps({"model": "starter"} | options).encode())).read(body)


def test_ids_and_logprobs_are_captured() -> None:
    taken = read(answer())
    (choice,) = taken.results[0].choices
    assert taken.results[0].prompt_token_ids == PROMPT_IDS
    assert taken.results[0].prompt_tokens == 3
    assert (choice.token_ids, choice.logprobs) == (ANSWER_IDS, LOGPROBS)
    assert (choice.text, choice.finish_reason) == ("Hello", "stop")
    assert choice.message == {"role": "assistant", "content": "Hello", "tool_calls": []}


def test_the_app_gets_nothing_that_it_did_not_ask_for() -> None:
    seen = json.loads(read(answer()).client_body)
    alone = answer() | {"model": "starter", "prompt_token_ids": None}
    alone["choices"][0] |= {"logprobs": None, "token_ids": None}
    assert seen == alone
    assert list(seen) == list(alone)


def test_the_app_gets_all_that_it_asked_for() -> None:
    seen = json.loads(read(answer(), logprobs=True, return_token_ids=True).client_body)
    assert seen == answer() | {"model": "starter"}


def test_one_wish_does_not_grant_the_other() -> None:
    logprobs = json.loads(read(answer(), logprobs=True).client_body)
    assert logprobs["choices"][0]["logprobs"] is not None
    assert (logprobs["choices"][0]["token_ids"], logprobs["prompt_token_ids"]) == (None, None)
    ids = json.loads(read(answer(), return_token_ids=True).client_body)
    assert ids["choices"][0]["logprobs"] is None
    assert (ids["choices"][0]["token_ids"], ids["prompt_token_ids"]) == (ANSWER_IDS, PROMPT_IDS)


def test_every_choice_counts() -> None:
    taken = read(answer(n=3))
    assert [choice.index for choice in taken.results[0].choices] == [0, 1, 2]
    assert all(choice["token_ids"] is None for choice in json.loads(taken.client_body)["choices"])


def test_hidden_reasoning_is_recorded_and_not_shown() -> None:
    body = answer()
    body["choices"][0]["message"]["reasoning"] = "thinking"
    taken = read(body, include_reasoning=False, logprobs=True)
    seen = json.loads(taken.client_body)["choices"][0]
    assert taken.results[0].choices[0].message["reasoning"] == "thinking"
    assert seen["message"] == answer()["choices"][0]["message"] | {"reasoning": None}
    assert seen["logprobs"] is None


def test_what_vllm_did_not_tell_is_none_and_not_zero() -> None:
    body = answer() | {"prompt_token_ids": None}
    body["choices"][0] |= {"token_ids": None, "logprobs": None}
    del body["usage"]
    taken = read(body)
    assert (taken.results[0].prompt_token_ids, taken.results[0].prompt_tokens) == (None, None)
    assert (taken.results[0].choices[0].token_ids, taken.results[0].choices[0].logprobs) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices": 1}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": 1, "index": 0}]}',
        b'{"choices":' + b"[" * 5000,
    ],
)
def test_what_is_no_chat_answer_is_unreadable(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        read_bytes(body)
