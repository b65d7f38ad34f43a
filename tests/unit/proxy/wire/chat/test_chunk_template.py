"""Chunks that are alike: read the quick way they come to the same, event by event, as read field by field."""

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.wire.chat import stream as chunk_template
from proxy.wire.chat.stream import ChatStream
from proxy.wire.interfaces import UNREADABLE, Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body

ODD = ["", " word", '"choices":[', "\n\n", "data: {", "\ud83d", "é\\"]
texts = st.one_of(st.text(max_size=6), st.sampled_from(ODD))
deltas = st.one_of(
    st.just({}),
    st.none(),
    st.fixed_dictionaries({"content": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.one_of(st.none(), texts)}),
    st.fixed_dictionaries({"reasoning": texts, "new_field": texts}),
    st.fixed_dictionaries(
        {"tool_calls": st.just([{"index": 0, "id": "call-123456789", "function": {"name": "f", "arguments": "{"}}])}
    ),
)
logprobs = st.one_of(
    st.none(),
    st.just({"content": None}),
    st.just({"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}),
    st.just({"content": [{"token": "a", "logprob": -9999.0}, {"token": '"choices":[', "logprob": -1e-07}]}),
)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    fields = {
        "index": draw(st.sampled_from([0, 0, 0, 1])),
        "delta": draw(deltas),
        "logprobs": draw(logprobs),
        "finish_reason": draw(st.sampled_from([None, None, "stop", "length"])),
        "token_ids": draw(st.one_of(st.none(), st.just([]), st.just([5]), st.just([7, 2**31 - 1]))),
        "stop_reason": draw(st.sampled_from([None, "###", 3])),
    }
    for name in draw(st.sets(st.sampled_from(["logprobs", "token_ids", "stop_reason"]), max_size=1)):
        del fields[name]
    return fields


@st.composite
def chunks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A stream: mostly one kind of chunk, and a few that are of another."""
    top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "starter@v0"}
    made, turned = [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 12))):
        chunk: dict[str, Any] = top | {"choices": draw(st.lists(choices(), min_size=1, max_size=1))}
        match draw(st.integers(0, 12)):
            case 0:
                chunk["choices"] = draw(st.lists(choices(), max_size=3))
            case 1:
                chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": 1}
            case 2:
                chunk["usage"] = None
            case 3:
                chunk["prompt_token_ids"] = [1, 2, 3]
            case 4:
                chunk = {"choices": chunk["choices"], **top}
            case 5:
                chunk["created"] = 2
        if turned:  # a server writes its fields in one order, whichever
            chunk["choices"] = [dict(reversed(choice.items())) for choice in chunk["choices"]]
        made.append(chunk)
    return made


def stream(options: dict[str, Any], *, quick: bool) -> ChatStream:
    body = {"model": "starter", "messages": [], "stream": True} | options
    made = DIALECTS["/v1/chat/completions"](read_body(json.dumps(body).encode()), Server()).new_stream()
    assert isinstance(made, ChatStream)
    if not quick:
        made._template._left = 0
    return made


OPTIONS = st.sampled_from(
    [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "return_token_ids": True},
     {"include_reasoning": False}]
)  # fmt: skip
PLAIN = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
TALK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


@settings(max_examples=200, deadline=None)
@given(OPTIONS, chunks(), st.booleans(), st.integers(1, 200))
@example({}, [TALK | {"choices": [{**PLAIN, "delta": {"content": text}}]} for text in "abc"], False, 50)
def test_quickly_or_field_by_field_the_same_goes_out_and_the_same_is_heard(
    options: dict[str, Any], sent: list[dict[str, Any]], spaced: bool, size: int
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    events = [f"data: {json.dumps(one, separators=separators, ensure_ascii=spaced)}\n\n" for one in sent]
    data = "".join([*events, "data: [DONE]\n\n"]).encode("utf-8", "surrogatepass")
    outcomes = []
    for quick in (True, False):
        made = stream(options, quick=quick)
        out = []
        try:
            out += [made.feed(data[at : at + size]) for at in range(0, len(data), size)]
        except UNREADABLE as error:
            out.append(type(error).__name__.encode())
        outcomes.append((out, made.results, made.done, made.error, made.upstream_id))
    assert outcomes[0] == outcomes[1]


def test_what_a_model_says_is_read_the_quick_way() -> None:
    made = stream({}, quick=True)
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
              "finish_reason": None, "token_ids": [5]}  # fmt: skip
    event = f"data: {json.dumps(TALK | {'choices': [choice]}, separators=(',', ':'))}\n\n".encode()
    for _ in range(3 * chunk_template.MOST_TRIES):
        made.feed(event)
    assert made._template._left == chunk_template.MOST_TRIES, "only the first one was read field by field"
    ((heard,),) = [one.choices for one in made.results]
    assert heard.token_ids == [5] * 24 and heard.logprobs == [-0.5] * 24


def test_a_stream_of_chunks_that_are_all_different_is_not_learned_for_ever() -> None:
    made = stream({}, quick=True)
    for number in range(3 * chunk_template.MOST_TRIES):
        chunk = TALK | {"created": number, "choices": [PLAIN]}
        made.feed(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode())
    assert made._template._left == 0
