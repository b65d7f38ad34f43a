import json
from typing import Any

import pytest

from proxy.errors import RefusedField
from proxy.wire.completions import TextRequest
from proxy.wire.interfaces import UNREADABLE, Server
from proxy.wire.request_body import read_body


def ask(**values: Any) -> TextRequest:
    return TextRequest(read_body(json.dumps({"model": "starter", "prompt": "hi"} | values).encode()))


def upstream(request: TextRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.to_upstream_body("starter@v3", cache_salt="default"))
    return body


def piece(index: int, text: str, ids: list[int] | None, **values: Any) -> dict[str, Any]:
    logprobs = None if ids is None else {"tokens": ["t"] * len(ids), "token_logprobs": [-0.5] * len(ids)}
    choice_fields = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "token_ids": ids}
    return choice_fields | {"prompt_token_ids": None} | values


def answer(*pieces: dict[str, Any]) -> bytes:
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    return json.dumps({"id": "cmpl-x", "model": "starter@v3", "choices": pieces, "usage": usage}).encode()


def test_vllm_gets_the_apps_fields_the_adapters_name_and_what_capture_needs() -> None:
    assert upstream(ask(temperature=0.5, unknown=1)) == {
        "model": "starter@v3",
        "prompt": "hi",
        "temperature": 0.5,
        "unknown": 1,
        "cache_salt": "default",
        "return_token_ids": True,
        "logprobs": 0,
    }


def test_a_wish_for_logprobs_keeps_its_number() -> None:
    assert upstream(ask(logprobs=3))["logprobs"] == 3
    assert upstream(ask(logprobs=None))["logprobs"] == 0


@pytest.mark.parametrize(
    "values", [{"echo": True}, {"echo": "yes"}, {"use_beam_search": True}, {"return_token_ids": "yes"}]
)
def test_what_capture_would_change_goes_as_it_came(values: dict[str, Any]) -> None:
    request = ask(**values)
    sent = {"model": "starter@v3", "prompt": "hi", "cache_salt": "default"} | values
    assert upstream(request) == sent
    assert request.wants_logprobs and request.wants_token_ids


@pytest.mark.parametrize("values", [{"echo": True, "logprobs": 0}, {"echo": 1, "logprobs": 5}, {"prompt_logprobs": 0}])
def test_what_ends_the_engine_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RefusedField, match="stop the engine"):
        ask(**values)


def test_an_answer_is_captured_and_the_app_gets_nothing_that_it_did_not_ask_for() -> None:
    taken = ask().read(answer(piece(0, "Hello", [7, 8], prompt_token_ids=[1, 2], finish_reason="stop")))
    (result,) = taken.results
    (choice,) = result.choices
    assert (taken.upstream_id, result.prompt_token_ids, result.prompt_tokens) == ("cmpl-x", [1, 2], 4)
    assert (choice.text, choice.token_ids, choice.logprobs) == ("Hello", [7, 8], [-0.5, -0.5])
    assert choice.finish_reason == "stop"
    seen = json.loads(taken.client_body)
    assert seen["model"] == "starter"
    assert seen["choices"] == [piece(0, "Hello", None, finish_reason="stop")]


def test_the_app_gets_all_that_it_asked_for() -> None:
    choice_fields = piece(0, "Hello", [7, 8], prompt_token_ids=[1, 2])
    taken = ask(logprobs=0, return_token_ids=True).read(answer(choice_fields))
    assert json.loads(taken.client_body)["choices"] == [choice_fields]


def test_each_prompt_is_a_conversation_of_its_own() -> None:
    request = ask(prompt=["a", "b"], n=2)
    pieces = [piece(index, str(index), [index], prompt_token_ids=[10 + index // 2]) for index in (2, 0, 3, 1)]
    first, second = request.read(answer(*pieces)).results
    assert ([choice.index for choice in first.choices], first.prompt_token_ids, first.prompt) == ([0, 1], [10], 0)
    assert ([choice.text for choice in second.choices], second.prompt_token_ids, second.prompt) == (["2", "3"], [11], 1)
    assert first.prompt_tokens is None, "the usage is of all prompts together"
    assert [json.loads(bytes(message)) for message in request.messages] == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]]), (["a"], ["a"]), ([], [[]])]
)
def test_a_prompt_may_be_text_or_ids(prompt: Any, prompts: list[Any]) -> None:
    assert ask(prompt=prompt).prompts == prompts


def test_a_stream_is_captured_and_stripped_event_by_event() -> None:
    stream = ask(stream=True).new_stream()
    events = [
        {"id": "cmpl-x", "model": "starter@v3", "choices": [piece(0, "He", [7], prompt_token_ids=[1, 2])]},
        {"id": "cmpl-x", "model": "starter@v3", "choices": [piece(0, "llo", [8], finish_reason="length")]},
        {"id": "cmpl-x", "model": "starter@v3", "choices": [], "usage": {"prompt_tokens": 2}},
    ]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    seen = b"".join(stream.feed(data[at : at + 5]) for at in range(0, len(data), 5))
    alone = [json.loads(event.removeprefix(b"data: ")) for event in seen.split(b"\n\n") if event]
    assert [event["model"] for event in alone] == ["starter"] * 3
    assert [event["choices"] for event in alone] == [
        [piece(0, "He", None)], [piece(0, "llo", None, finish_reason="length")], []
    ]  # fmt: skip
    (result,) = stream.results
    (choice,) = result.choices
    assert (choice.text, choice.token_ids, choice.logprobs) == ("Hello", [7, 8], [-0.5, -0.5])
    assert (result.prompt_token_ids, result.prompt_tokens, stream.upstream_id) == ([1, 2], 2, "cmpl-x")
    assert stream.done
    assert stream.last() == b"data: [DONE]\n\n"


def test_what_nobody_answered_is_there_all_the_same() -> None:
    result = ask(prompt=["a", "b"], n=3, stream=True).new_stream().results
    assert [[choice.index for choice in one.choices] for one in result] == [[0], [3]]
    assert [choice.text for one in result for choice in one.choices] == [None, None]


@pytest.mark.parametrize("wrong", [{"text": 7}, {"index": "0"}, {"token_ids": "x"}, {"finish_reason": []}])
def test_an_event_with_a_wrong_type_is_unreadable_at_once(wrong: dict[str, Any]) -> None:
    data = b"data: " + json.dumps({"choices": [piece(0, "x", [1]) | wrong]}).encode() + b"\n\n"
    stream = ask(stream=True).new_stream()
    with pytest.raises(UNREADABLE):
        stream.feed(data)
    assert [choice.index for result in stream.results for choice in result.choices] == [0]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices": 1}', b'{"choices": [{}]}', b'{"choices": ' + b"[" * 5000])
def test_what_is_no_answer_is_unreadable(body: bytes) -> None:
    with pytest.raises(UNREADABLE):
        ask().read(body)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, None),
        ({"max_tokens": 4, "n": 2, "stop": "x", "logprobs": 1, "echo": False}, None),
        ({"echo": True}, "no_logprobs"),
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9, "suffix": "x", "best_of": 2}, None),
        ({"bad_words": ["x"]}, "sampling_bent: bad_words"),
    ],
)
def test_sampling_that_bends_says_what_bent_it(values: dict[str, Any], why: str | None) -> None:
    assert ask(**values).why_not_trained() == why


def test_what_constrains_the_sampling_is_recorded() -> None:
    assert ask(top_p=0.9, structured_outputs={"regex": "a"}).constraints() == {
        "top_p": 0.9,
        "grammar": "structured_outputs",
    }
    assert ask(max_tokens=4).constraints() is None


def test_another_server_gets_it_as_it_came() -> None:
    request = TextRequest(read_body(b'{"model": "teacher", "prompt": "hi", "logprobs": 1}'), Server(captured=False))
    assert request.to_upstream_body("gpt-9", "salt") == b'{"model":"gpt-9","prompt":"hi","logprobs":1}'
    assert request.why_not_trained() == "demonstration"
