import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.errors import BadRequest, NotJson, ProxyError, RefusedField
from proxy.wire.chat.request import ChatRequest
from proxy.wire.decoding import raw
from proxy.wire.interfaces import Server
from proxy.wire.request_body import REFUSED, Body, read_body

MESSAGES = [{"role": "user", "content": "hi"}]


def read_request(body: bytes) -> ChatRequest:
    return ChatRequest(read_body(body))


def ask(**values: Any) -> ChatRequest:
    return read_request(json.dumps({"model": "starter", "messages": MESSAGES} | values).encode())


def upstream(request: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.to_upstream_body("starter@v3", cache_salt="default"))
    return body


def test_vllm_gets_the_apps_fields_the_adapters_name_and_what_capture_needs() -> None:
    body = upstream(ask(temperature=0.5, unknown={"a": 1}))
    assert body == {
        "model": "starter@v3",
        "messages": MESSAGES,
        "temperature": 0.5,
        "unknown": {"a": 1},
        "cache_salt": "default",
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 0,
    }


def test_fields_pass_byte_for_byte() -> None:
    body = b'{"model":"starter","messages":[{"role":"user","content":"\\u00e9"}],"seed":12345678901234567890,"x":1.50}'
    sent = read_request(body).to_upstream_body("starter@v0", "default")
    for piece in (b'[{"role":"user","content":"\\u00e9"}]', b"12345678901234567890", b"1.50"):
        assert piece in sent


@pytest.mark.parametrize("salt", ["default", 'sal"t\\', "é\n"])
@pytest.mark.parametrize("fields", [["messages", "model", "seed"], ["model"], ["stream", "model", "tools", "messages"]])
def test_the_fields_keep_their_order_and_what_capture_needs_follows(fields: list[str], salt: str) -> None:
    values = {"model": "starter", "messages": MESSAGES, "seed": 1, "stream": True, "tools": []}
    request = read_request(json.dumps({name: values[name] for name in fields}).encode())
    for name in ("starter@v3", 'a"b'):
        sent = [(name if field == "model" else values[field]) for field in fields]
        added = [("cache_salt", salt), ("return_token_ids", True), ("logprobs", True), ("top_logprobs", 0)]
        pairs = json.loads(request.to_upstream_body(name, salt), object_pairs_hook=list)
        assert [field for field, _ in pairs] == [*fields, *dict(added)]
        assert json.loads(request.to_upstream_body(name, salt)) == dict(zip(fields, sent, strict=True)) | dict(added)
    assert json.loads(request.sampling()) == {name: values[name] for name in fields if name in ("seed", "stream")}


def test_a_salt_of_another_is_never_said_twice() -> None:
    """No app's body gets here with one; what stands for a body may."""
    values = {"model": "starter", "messages": MESSAGES, "cache_salt": "another's"}
    request = ChatRequest(Body({name: raw(value) for name, value in values.items()}, values, "starter"))
    pairs = json.loads(request.to_upstream_body("starter@v0", "default"), object_pairs_hook=list)
    assert [value for name, value in pairs if name == "cache_salt"] == ["default"]


def test_a_wish_for_logprobs_keeps_its_number() -> None:
    body = upstream(ask(logprobs=True, top_logprobs=3))
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)


@pytest.mark.parametrize("values", [{"logprobs": False}, {"logprobs": None}, {"logprobs": True, "top_logprobs": None}])
def test_logprobs_are_captured_whatever_the_app_said(values: dict[str, Any]) -> None:
    body = upstream(ask(**values))
    assert (body["logprobs"], body["top_logprobs"]) == (True, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"top_logprobs": 2},
        {"top_logprobs": -1, "logprobs": False},
        {"logprob_token_ids": [1]},
        {"logprobs": "maybe"},
        {"logprobs": 5},
        {"return_token_ids": "yes"},
    ],
)
def test_capture_makes_no_request_valid_that_is_not(values: dict[str, Any]) -> None:
    request = ask(**values)
    assert upstream(request) == {"model": "starter@v3", "messages": MESSAGES, "cache_salt": "default"} | values
    assert request.wants_logprobs
    assert request.wants_token_ids


@pytest.mark.parametrize(
    "values",
    [{"prompt_logprobs": 0}, {"prompt_logprobs": 1}, {"echo": True}, {"echo": "yes"}, {"echo": 1, "logprobs": True}],
)
def test_what_ends_the_engine_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RefusedField, match="stop the engine"):
        ask(**values)


def test_hidden_reasoning_is_captured_and_its_ids_and_logprobs_stay_hidden() -> None:
    request = ask(include_reasoning=False, logprobs=True, return_token_ids=True)
    assert upstream(request)["include_reasoning"] is True
    assert (request.wants_logprobs, request.wants_token_ids, request.wants_prompt_token_ids) == (False, False, True)


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_field_of_the_server_is_refused_by_name(field: str) -> None:
    with pytest.raises(RefusedField, match=field) as caught:
        ask(**{field: None})
    assert caught.value.param == field


def test_a_refused_field_cannot_hide_behind_an_escape() -> None:
    with pytest.raises(RefusedField):
        read_request(b'{"model": "starter", "cache\\u005fsalt": "other"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{",
        b"[]",
        b"null",
        b'"model"',
        b'{"model": "starter",}',
        b'{"model": NaN}',
        b'{"messages": [{"content": "\xff"}]}',
        b'{"messages": [{"score": 1e999}]}',
        b'{"messages": ["\\ud800"]}',
        b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotJson):
        read_request(body)


@pytest.mark.parametrize("model", [None, 1, ["starter"], {}])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(BadRequest, match="GET /v1/models"):
        ask(model=model)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 1, "max_tokens": 4, "n": 8, "seed": 1, "stop": ["\n"], "stream": True, "logprobs": True},
        {"temperature": 2, "top_p": 1.0, "top_k": -1, "min_p": 0, "presence_penalty": 0.0, "repetition_penalty": 1},
        {"temperature": None, "top_p": None, "logit_bias": None, "response_format": {"type": "text"}},
        {"tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": False}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "none"},
        {"user": "u", "metadata": {}, "stream_options": {"include_usage": True}, "tool_choice": "none"},
    ],
)
def test_sampling_that_bends_nothing_can_be_trained_on(values: dict[str, Any]) -> None:
    assert ask(**values).why_not_trained() is None


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"temperature": 0}, "greedy"),
        ({"temperature": 0.0, "top_p": 0.5}, "greedy"),
        ({"temperature": 2.1}, "sampling_bent: temperature"),
        ({"temperature": -1}, "sampling_bent: temperature"),
        ({"bad_words": ["x"]}, "sampling_bent: bad_words"),
        ({"never_heard_of": 1}, "sampling_bent: never_heard_of"),
    ],
)
def test_sampling_that_bends_says_what_bent_it(values: dict[str, Any], why: str) -> None:
    assert ask(**values).why_not_trained() == why


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"image_url": "data:,x"},
        {"type": "text", "text": "x", "uuid": "media of before"},
        {"type": ["text"], "text": "x"},
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("length", [1, 1000])
def test_what_is_no_text_is_media(part: dict[str, Any], role: str, length: int) -> None:
    messages = [{"role": "user", "content": "x" * length}, {"role": role, "content": [{"type": "text"}, part]}]
    assert ask(messages=messages, temperature=0).why_not_trained() == "media"


@pytest.mark.parametrize("length", [1, 1000])
@pytest.mark.parametrize(
    "content", ["hi", None, ["hi"], [{"type": "text", "text": "hi"}, {"type": "refusal", "refusal": "no"}]]
)
def test_parts_of_text_are_no_media(content: Any, length: int) -> None:
    messages = [{"role": "user", "content": "x" * length}, {"role": "assistant", "content": content}]
    assert ask(messages=messages).why_not_trained() is None


def test_what_constrains_the_sampling_is_recorded_beside_the_reason() -> None:
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    request = ask(tools=strict, top_p=0.9, temperature=0.5)
    assert (request.why_not_trained(), request.constraints()) == (None, {"top_p": 0.9, "grammar": "tools"})
    assert ask(temperature=0.5, tools=[{"type": "function"}]).constraints() is None


def test_of_another_server_nothing_is_known_to_constrain_it() -> None:
    request = ChatRequest(Body({}, {"model": "m", "top_p": 0.9}, "m"), Server(captured=False))
    assert (request.why_not_trained(), request.constraints()) == ("demonstration", None)


def test_what_is_recorded_is_what_the_app_said() -> None:
    request = ask(tools=[{"type": "function"}], temperature=0.5, user="u")
    assert [json.loads(bytes(message)) for message in request.messages] == MESSAGES
    assert json.loads(bytes(request.tools_or_null)) == [{"type": "function"}]
    assert json.loads(request.sampling()) == {"temperature": 0.5, "user": "u"}
    assert request.end_user == "u"


def test_what_was_not_said_is_nothing() -> None:
    request = read_request(b'{"model": "m", "tools": null, "messages": "hi", "user": 1}')
    assert (request.messages, bytes(request.tools_or_null), request.end_user) == ([], b"null", None)


FIELDS = st.sampled_from(["messages", "temperature", "logprobs", "top_logprobs", "stream", "n", "tools", "echo", "x"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@examples(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary()
    | st.dictionaries(FIELDS, VALUES | st.lists(VALUES)).map(
        lambda fields: json.dumps({"model": "m"} | fields).encode()
    )
)
def test_any_bytes_are_a_request_or_a_clear_error(body: bytes) -> None:
    try:
        request = read_request(body)
    except ProxyError as error:
        assert error.status == 400
    else:
        sent = json.loads(request.to_upstream_body("m@v0", "default"))
        fields_of_body = json.loads(body)
        assert {key: value for key, value in sent.items() if key in fields_of_body} | fields_of_body | {
            "model": "m@v0"
        } != {}
        assert set(fields_of_body) <= set(sent)
        request.sampling(), request.why_not_trained(), request.messages, request.end_user
