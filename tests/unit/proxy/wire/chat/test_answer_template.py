"""Whole answers of one form: read at once they come to the same, byte for byte, as read field by field."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.wire.chat import answer as chat_answer
from proxy.wire.chat.request import ChatRequest
from proxy.wire.interfaces import UNREADABLE, Answer
from proxy.wire.request_body import read_body
from tests.unit.proxy.conftest import answer

ODD = ["", "Hello", '"choices":[', ',"token_ids":[1]', '"model":"starter@v0"', "\0", "\ud83d", "é\\/"]
texts = st.one_of(st.text(max_size=6), st.sampled_from(ODD))
messages = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.one_of(st.none(), texts)}),
    st.fixed_dictionaries({"content": texts, "token_ids": st.just([1]), "logprobs": st.just({"content": None})}),
    st.sampled_from([None, 1, [], {"tool_calls": [{"id": "call-1", "index": 0, "function": {"name": "f"}}]}]),
)
logprobs = st.one_of(
    st.none(),
    st.just({"content": None}),
    st.just({"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}),
    st.just({"content": [{"token": ',"finish_reason":', "logprob": -1e-07}]}),
)
ids = st.one_of(st.none(), st.lists(st.sampled_from([0, 7, 2**31 - 1, 2**31, -1]), max_size=3))
WANTED = [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "return_token_ids": True}]


@st.composite
def choices(draw: st.DrawFn, index: int) -> dict[str, Any]:
    fields = {
        "index": draw(st.sampled_from([index, index, index, -1])),
        "message": draw(messages),
        "logprobs": draw(logprobs),
        "finish_reason": draw(st.sampled_from([None, "stop", "é", 3])),
        "stop_reason": draw(st.sampled_from([None, "###", 3])),
        "token_ids": draw(ids),
    }
    for name in draw(st.sets(st.sampled_from(["logprobs", "token_ids", "stop_reason"]), max_size=1)):
        del fields[name]
    return fields


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    fields = {
        "id": draw(st.sampled_from(["chatcmpl-1", "é", None])),
        "object": "chat.completion",
        "created": 1,
        "model": draw(st.sampled_from(["starter@v0", "é", None])),
        "choices": [draw(choices(place)) for place in range(draw(st.integers(0, 2)))],
        "usage": draw(st.sampled_from([None, {"prompt_tokens": 3, "total_tokens": 4}, {"model": "starter@v0"}])),
        "prompt_token_ids": draw(ids),
        "kv_transfer_params": None,
    }
    if draw(st.booleans()):
        fields |= {"model": fields.pop("model")} if draw(st.booleans()) else {"new_field": {"a": [1.50, 2]}}
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]))
    body_text = json.dumps(fields, separators=separators, ensure_ascii=draw(st.booleans()))
    body_text = body_text.replace(
        *draw(st.sampled_from([("", ""), ('"id"', '"\\u0069d"'), ("{", '{"created":2,'), ("\\u0000", "\0")]))
    )
    return body_text.encode("utf-8", "surrogatepass") + draw(st.sampled_from([b"", b"", b"\n"]))


def request_for(**wanted: Any) -> ChatRequest:
    return ChatRequest(read_body(json.dumps({"model": "starter", "messages": []} | wanted).encode()))


def read(request: ChatRequest, body: bytes) -> Answer | None:
    try:
        return request.read(body)
    except UNREADABLE:
        return None


def alone(request: ChatRequest, body: bytes) -> Answer | None:
    """As it is read where no answer was read before."""
    chat_answer._last_templates.clear()
    return read(request, body)


@pytest.mark.parametrize("wanted", WANTED)
def test_an_answer_like_the_last_one_is_read_at_once(wanted: dict[str, Any]) -> None:
    request, body = request_for(**wanted), json.dumps(answer(n=2), separators=(",", ":")).encode()
    expected = alone(request, body)
    (form,) = chat_answer._last_templates.values()
    assert form is not None
    assert form.read(body, "starter") == expected


@settings(max_examples=400, deadline=None)
@given(st.lists(answers(), min_size=1, max_size=3), st.sampled_from(WANTED))
@example([json.dumps(answer(), separators=(",", ":")).encode()], {})
def test_whatever_was_read_before_an_answer_comes_to_the_same(bodies: list[bytes], wanted: dict[str, Any]) -> None:
    request = request_for(**wanted)
    expected = [alone(request, body) for body in bodies]
    for model in [json.dumps(answer(), separators=(",", ":")).encode(), *bodies]:
        chat_answer._last_templates.clear()
        read(request, model)
        assert [read(request, body) for body in bodies] == expected


def test_fields_in_another_order_go_out_in_that_order() -> None:
    request, fields = request_for(), answer()
    read(request, json.dumps(fields, separators=(",", ":")).encode())
    turned = fields | {"choices": [dict(reversed(choice.items())) for choice in fields["choices"]]}
    for other in (turned, dict(reversed(fields.items()))):
        body_text = request.read(json.dumps(other, separators=(",", ":")).encode()).client_body
        assert list(json.loads(body_text)) == list(other)
        assert list(json.loads(body_text)["choices"][0]) == list(other["choices"][0])


def test_who_wants_more_than_the_last_one_gets_it() -> None:
    body = json.dumps(answer(), separators=(",", ":")).encode()
    read(request_for(), body)
    assert json.loads(request_for(return_token_ids=True).read(body).client_body)["choices"][0]["token_ids"] is not None
    assert json.loads(request_for().read(body).client_body)["choices"][0]["token_ids"] is None
