"""Which messages after an answer are a tool's error, and which the user's reply."""

from typing import Any

import pytest

from trainer.domain.examples.followups import after_answer, are_tool_results, tool_error, user_reply

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def result(content: Any, **values: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **values}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def anthropic(content: Any, **values: Any) -> dict[str, Any]:
    return user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **values}])


@pytest.mark.parametrize(
    "text",
    [
        "Error executing tool look: no such file",
        "Error: no such file",
        "  error: no such file",
        "Traceback (most recent call last):\n  File",
        '{"error": "no such file"}',
        ' {"status": 404, "error": {"message": "no such file"}}',
        '{"error": true}',
    ],
)
def test_a_result_that_says_an_error_is_one(text: str) -> None:
    assert tool_error([result(text)]) == text.strip()
    assert tool_error([result([{"type": "text", "text": text}])]) == text.strip()
    assert tool_error([anthropic(text)]) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "",
        "Errors found: 0",
        "errors: none",
        "0 errors. Error: none",
        "No error: all is well",
        '{"error": null, "rows": 3}',
        '{"error": ""}',
        '{"error": {}}',
        '{"error": false}',
        '{"rows": [{"error": "inside"}]}',
        '[{"error": "in a list"}]',
        '{"error": "cut of',
        '{"a":' * 5000,
    ],
)
def test_any_other_result_is_none(text: str) -> None:
    assert tool_error([result(text)]) is None
    assert tool_error([anthropic(text, is_error=False)]) is None


def test_what_the_app_marks_as_an_error_is_one_whatever_it_says() -> None:
    assert tool_error([anthropic("not there", is_error=True)]) == "not there"
    assert tool_error([anthropic([{"type": "text", "text": "not"}, {"type": "image"}], is_error=True)]) == "not"
    assert tool_error([result("not there", is_error=True)]) == "not there"
    assert tool_error([anthropic("", is_error=True)]) is None
    assert tool_error([result("42", is_error="no")]) is None


def test_of_several_results_the_errors_are_taken_together() -> None:
    assert tool_error([result("Error: a"), result("42"), result("error: b")]) == "Error: a\nerror: b"


def test_only_tools_have_errors_and_only_those_before_the_next_answer() -> None:
    assert tool_error([user("Error: I see nothing"), {"role": "system", "content": "Error: x"}]) is None
    assert tool_error([result("42"), CALLED, result("Error: of the next one")]) is None
    assert tool_error([]) is None


def test_a_reply_is_the_users_first_message_as_text() -> None:
    assert user_reply([user(" No, the other one. "), user("And fast.")]) == "No, the other one."
    parts = [{"type": "text", "text": "No,"}, {"type": "image_url", "image_url": {"url": "x"}}, {"text": "this one."}]
    assert user_reply([{"role": "system", "content": "Be brief."}, user(parts)]) == "No,\nthis one."
    assert user_reply([result("42"), user("Thanks.")]) == "Thanks."
    (both,) = anthropic("42")["content"]
    assert user_reply([user([both, {"type": "text", "text": "Thanks."}])]) == "Thanks."


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [result("42")],
        [anthropic("42")],
        [user("")],
        [user([{"type": "image_url", "image_url": {"url": "x"}}]), user("a caption")],
        [{"role": "assistant", "content": "I add:"}, user("No.")],
        ["no message"],
        [{"role": "user"}],
    ],
)
def test_without_a_message_of_the_user_there_is_no_reply(messages: list[Any]) -> None:
    assert user_reply(messages) is None


def test_an_answer_is_recognised_in_the_conversation_that_goes_on_from_it() -> None:
    again = {**CALLED, "content": "", "tool_calls": [CALL | {"id": "call_other"}]}
    whole = [user("Look."), again, result("42")]
    assert after_answer(whole, {**CALLED, "reasoning": "hm"}) == [result("42")]
    text = {"role": "assistant", "content": "One."}
    twice = [user("A?"), text, user("B?"), {"role": "assistant", "content": [{"type": "text", "text": "One. "}]}]
    assert after_answer([*twice, user("C?")], text) == [user("C?")]


def test_a_conversation_without_the_answer_goes_on_from_another_one() -> None:
    text = {"role": "assistant", "content": "One."}
    assert after_answer([user("A?")], text) == ()
    assert after_answer([user("A?"), {"role": "assistant", "content": "Two."}, user("No.")], text) == ()
    assert after_answer([user("One.")], text) == ()


ITEM = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


@pytest.mark.parametrize(
    "messages",
    [[result("3")], [result("3"), result([{"type": "text", "text": "4"}])], [anthropic("3")], [ITEM, ITEM]],
    ids=["chat", "two", "anthropic", "responses"],
)
def test_messages_that_are_results_of_tools_in_each_dialect(messages: list[Any]) -> None:
    assert are_tool_results(messages)
    assert not are_tool_results([*messages, user("and then?")])


@pytest.mark.parametrize(
    "message",
    [
        user("3"),
        user([{"type": "text", "text": "3"}]),
        user([{"type": "tool_result", "content": "3"}, {"type": "text", "text": "and then?"}]),
        {"role": "system", "content": "3"},
        {"type": "message", "content": "3"},
        {"type": "reasoning"},
        CALLED,
        "3",
    ],
)
def test_other_messages_are_none(message: Any) -> None:
    assert not are_tool_results([message])
    assert not are_tool_results([])
