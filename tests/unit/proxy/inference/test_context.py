"""A turn: what an answer says about itself, and which requests go on from one."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from proxy.domain.address import RECORDED
from proxy.http.asgi import headers_in
from proxy.inference.context import CallContext
from proxy.trajectories.conversation_hash import BEGINNING, ConversationHasher
from proxy.wire.interfaces import Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body

QUESTION = {"role": "user", "content": "hi"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Hello."}
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "Assistant", None, 1, ["assistant"]])
CONTENTS = st.sampled_from(["hi", "", None, "assistant", [{"type": "text", "text": "hi"}]])
MESSAGE = st.fixed_dictionaries({}, optional={"role": ROLES, "content": CONTENTS, "type": st.just("message")})
TOOL_TURNS = st.sampled_from(
    [
        {"type": "function_call", "call_id": "c1", "name": "move", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "move"}}]},
    ]
)
SAID = st.one_of(st.lists(st.one_of(MESSAGE, TOOL_TURNS, st.just("assistant"), st.none()), max_size=5), st.just("hi"))
FIELDS = {"/v1/completions": "prompt", "/v1/responses": "input"}
"""Where a request has its conversation, if not in `messages`."""


def asking(path: str, conversation: Any, *, captured: bool = True) -> CallContext:
    """A turn as far as its conversation."""
    values = {"model": "m", FIELDS.get(path, "messages"): conversation}
    values |= {"max_tokens": 8} if path == "/v1/messages" else {}
    known: dict[str, Any] = dict.fromkeys(("address", "principal", "speaker"))
    known |= {"project": "p", "id": "call-1", "key_id": "k", "owner": "k\0", "question": (path, b"", None)}
    asked = DIALECTS[path](read_body(json.dumps(values).encode()), Server(captured, 4096))
    return CallContext(**known, request=asked, hasher=ConversationHasher(), created_at_s=0, began=0)


@pytest.mark.parametrize("group_id", [None, "group:1"])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("explored", [None, 0.7])
def test_an_answer_says_which_call_it_is(group_id: str | None, dropped: bool, explored: float | None) -> None:
    turn: Any = SimpleNamespace(
        id="call-1",
        place=SimpleNamespace(trajectory_id="a:b@c", by="header"),
        speaker=SimpleNamespace(version=3),
        address=SimpleNamespace(group_id=group_id),
        dropped=dropped,
        explored=explored,
        sign_feedback=None,
    )
    told = dict(headers_in(CallContext.header_lines(turn)))
    assert told.pop(b"x-explored", None) == (None if explored is None else b"0.7")
    assert (told.pop(b"x-group-id", None), told.pop(b"x-whetstone-recorded", None)) == (
        None if group_id is None else b"group:1",
        b"false" if dropped else None,
    )
    assert told == {
        b"x-completion-id": b"call-1",
        b"x-trajectory-id": b"a:b@c",
        b"x-policy-version": b"3",
        b"x-threaded-by": b"header",
    }


@pytest.mark.parametrize("dropped", [False, True])
def test_an_answer_that_is_recorded_carries_a_token_for_feedback_on_it(dropped: bool) -> None:
    turn: Any = asking("/v1/chat/completions", [QUESTION])
    turn.place, turn.speaker = SimpleNamespace(trajectory_id="t", by="new"), SimpleNamespace(version=3)
    turn.address, turn.dropped = SimpleNamespace(group_id=None), dropped
    turn.sign_feedback = lambda key_id, completion_id: f"wft_{key_id}_{completion_id}"
    sent, stored = dict(turn.headers()), dict(turn.stored_headers())
    assert sent.get(b"x-feedback-token") == (None if dropped else b"wft_k_call-1")
    assert stored == {name: value for name, value in sent.items() if name != b"x-feedback-token"}
    again = turn.token_headers([(b"x-completion-id", b"call-0")])
    assert again == [(b"x-feedback-token", b"wft_k_call-0")]
    turn.sign_feedback = None
    assert turn.token_headers([(b"x-completion-id", b"call-0")]) == []


@given(path=st.sampled_from(sorted(RECORDED)), conversation=SAID, captured=st.booleans())
@example(path="/v1/chat/completions", conversation=[ANSWER, "assistant"], captured=True)
@example(path="/v1/chat/completions", conversation=[ANSWER, None, {"role": "user"}], captured=False)
@example(path="/v1/chat/completions", conversation=[{"role": "assistant"}], captured=True)
@example(path="/v1/chat/completions", conversation=[ANSWER | {"tool_calls": []}, {"role": "tool"}], captured=True)
@example(path="/v1/messages", conversation=[QUESTION, ANSWER, QUESTION], captured=True)
@example(path="/v1/responses", conversation=[QUESTION, ANSWER, QUESTION], captured=True)
def test_what_is_not_read_before_the_server_is_asked_goes_on_from_nothing(
    path: str, conversation: Any, captured: bool
) -> None:
    if path == "/v1/chat/completions":  # where items of the Responses API are refused
        items = ("function_call", "reasoning")
        assume(not any(isinstance(one, dict) and one.get("type") in items for one in conversation))
    turn = asking(path, conversation, captured=captured)
    found_by = turn.continued_conversation().lookup_keys
    assert turn.conversation.lookup_keys == found_by


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_conversation_that_begins_is_read_later_and_one_with_an_answer_at_once(path: str) -> None:
    begins = asking(path, [QUESTION])
    assert begins.continued_conversation() is BEGINNING
    assert begins.known_conversation is None
    for messages in ([QUESTION, ANSWER, QUESTION], [QUESTION, ANSWER], [ANSWER, *[QUESTION] * 40]):
        goes_on = asking(path, messages)
        assert goes_on.continued_conversation() is goes_on.conversation
        assert len(goes_on.conversation.answers) == 1
