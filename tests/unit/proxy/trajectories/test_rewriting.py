"""Which rewritten forms of an answer are recognised, and which texts are no evidence."""

import json
from typing import Any

import pytest

from proxy.trajectories.rewriting import LEAST_CHARACTERS, MOST_CHARACTERS, Evidence, echo_since, evidence, marks_of
from tests.unit.proxy.conftest import raw

QUESTION = {"role": "user", "content": "What do I need in Oslo?"}
TEXT = "Pack a warm coat:\n\n- it snows *all week* in Oslo."
CALL_ID = "chatcmpl-tool-0123456789abcdef"
ARGUMENTS = {"city": "Oslo in Norway", "days": 2}
CALL = {"id": CALL_ID, "type": "function", "function": {"name": "weather_of", "arguments": json.dumps(ARGUMENTS)}}
OTHER_CALL = {"id": "call_9", "function": {"name": "weather_of", "arguments": '{"days": 2, "city": "Rome in Italy"}'}}
WITH_TOOL = {"content": "I look it up.", "tool_calls": [CALL]}


def compared(answer: dict[str, Any], *echo: dict[str, Any]) -> Evidence:
    """What an app's messages after its question show about this answer."""
    messages = [raw(one) for one in (QUESTION, *echo, {"role": "user", "content": "And then?"})]
    return evidence(marks_of({"role": "assistant", **answer}), "0198f3a2b1c0aabbccddeeff", echo_since(messages, 0))


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize(
    "echo",
    [
        assistant("Pack a warm coat: it snows all week in Oslo"),
        assistant(f"<answer>\n{TEXT}\n</answer>"),
        assistant(f"<think>\nOslo lies in the north.\n</think>\n\n{TEXT}"),
        assistant(json.dumps(TEXT)),
        assistant([{"type": "output_text", "text": TEXT, "annotations": []}]),
        {"role": "assistant", "type": "message", "id": "made anew", "content": [{"type": "output_text", "text": TEXT}]},
        assistant(TEXT.upper(), name="helper"),
    ],
)
def test_a_text_is_the_same_in_another_form(echo: dict[str, Any]) -> None:
    assert compared({"content": TEXT}, echo) is Evidence.WHOLE


@pytest.mark.parametrize("echo", [f"Thought: {TEXT}\nObservation: none", json.dumps({"thought": TEXT, "action": None})])
def test_a_text_is_recognised_among_others(echo: str) -> None:
    assert compared({"content": TEXT}, assistant(echo)) is Evidence.PART


def test_a_step_of_smolagents_is_recognised() -> None:
    """It closes the code block itself, and appends the call that the code is to it, as Python prints it."""
    code = "Thought: I will print it.\n<code>\nprint(weather_of('Oslo'))\n"
    call = {"id": "call_2", "type": "function", "function": {"name": "python_interpreter", "arguments": code[33:]}}
    assert compared({"content": code}, assistant(f"{code}</code>\nCalling tools:\n[{call}]")) is Evidence.PART
    called = CALL | {"function": {"name": "weather_of", "arguments": ARGUMENTS}}
    assert compared(WITH_TOOL, assistant(f"Calling tools:\n[{called}]")) is Evidence.ID


@pytest.mark.parametrize(
    "echo",
    [
        assistant(None, tool_calls=[CALL | {"id": "call_1"}]),
        assistant("", tool_calls=[{"function": {"name": "weather_of", "arguments": ARGUMENTS}}]),
        assistant([{"type": "tool_use", "id": "1", "name": "weather_of", "input": ARGUMENTS}]),
        {"type": "function_call", "call_id": "1", "name": "weather_of", "arguments": json.dumps(ARGUMENTS)},
    ],
)
def test_tool_calls_are_compared_by_name_and_arguments(echo: dict[str, Any]) -> None:
    assert compared(WITH_TOOL, echo) is Evidence.WHOLE


def test_tool_calls_are_recognised_in_a_text() -> None:
    text = f"Action: weather_of\nAction Input: {json.dumps(ARGUMENTS)}"
    assert compared(WITH_TOOL, assistant(text)) is Evidence.PART
    assert compared(WITH_TOOL, assistant(text.replace("Oslo", "Rome"))) is Evidence.NONE


@pytest.mark.parametrize("echo", [{"role": "tool", "tool_call_id": CALL_ID, "content": "2"}, assistant(f"[{CALL_ID}]")])
def test_an_id_that_a_server_made_is_the_best_evidence(echo: dict[str, Any]) -> None:
    assert compared(WITH_TOOL, assistant("(left out)"), echo) is Evidence.ID


def test_ids_of_items_and_of_the_answer_itself_count() -> None:
    item = {"type": "message", "id": "msg_8d1c7bfa0e334455", "content": [{"type": "output_text", "text": "Yes."}]}
    changed = item | {"role": "assistant", "content": [{"type": "output_text", "text": "No."}]}
    assert compared({"content": [item]}, changed) is Evidence.ID
    assert compared({"content": "Yes."}, assistant("?", id="msg_0198f3a2b1c0aabbccddeeff_0")) is Evidence.ID


@pytest.mark.parametrize("call_id", ["functions.weather:0", "weather_lookup", "call_1", "", None])
def test_an_id_that_another_answer_may_have_is_none(call_id: Any) -> None:
    answer = {"content": "", "tool_calls": [CALL | {"id": call_id}]}
    assert compared(answer, assistant(f"{call_id}")) is Evidence.NONE


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        ({"content": TEXT}, assistant("Pack a warm coat: it rains all week in Oslo")),
        ({"content": TEXT}, assistant(TEXT[:30])),
        ({"content": TEXT}, assistant(TEXT, tool_calls=[OTHER_CALL])),
        ({"content": "Yes."}, assistant("yes")),
        ({"content": "Spam"}, assistant("This is Spam")),
        ({"content": ""}, assistant("")),
        (WITH_TOOL, assistant("I look it up.", tool_calls=[OTHER_CALL])),
        (WITH_TOOL, assistant("I look it up.")),
    ],
)
def test_what_an_example_may_say_as_well_is_no_evidence(answer: dict[str, Any], echo: dict[str, Any]) -> None:
    assert compared(answer, echo) is Evidence.NONE


def test_a_short_text_counts_where_no_letter_differs() -> None:
    """As it does where the whole conversation is repeated exactly: only the API's form is another one."""
    assert compared({"content": "Yes."}, assistant([{"type": "output_text", "text": "Yes. "}])) is Evidence.WHOLE


def test_the_end_of_a_long_answer_is_compared() -> None:
    text = " ".join(f"word{number}" for number in range(500))
    assert len(marks_of({"content": text}).text) == MOST_CHARACTERS
    assert compared({"content": text}, assistant(f"{text}</code>")) is Evidence.PART
    assert compared({"content": text}, assistant(text[: len(text) // 2])) is Evidence.NONE


def test_long_tool_calls_are_compared_by_a_hash() -> None:
    call = {"id": "1", "function": {"name": "write", "arguments": json.dumps({"text": "word " * 5000})}}
    assert len(marks_of({"tool_calls": [call]}).calls) < 20
    assert compared({"tool_calls": [call]}, assistant("", tool_calls=[call | {"id": "2"}])) is Evidence.WHOLE
    assert compared({"tool_calls": [call]}, assistant(call["function"]["arguments"])) is Evidence.NONE


def test_the_words_of_the_least_length_are_evidence() -> None:
    text = "a" * LEAST_CHARACTERS
    assert compared({"content": text}, assistant(f"'{text}'")) is Evidence.WHOLE
    assert compared({"content": text[1:]}, assistant(f"'{text[1:]}'")) is Evidence.NONE


def test_only_what_follows_the_prompt_up_to_the_next_message_of_the_app_is_the_answer() -> None:
    later = [assistant("Done."), {"role": "user", "content": "Repeat."}, assistant(TEXT)]
    messages = [raw(one) for one in (QUESTION, *later)]
    marks = marks_of({"content": TEXT})
    assert evidence(marks, None, echo_since(messages, 0)) is Evidence.WHOLE
    assert evidence(marks, None, echo_since(messages, 1)) is Evidence.NONE


@pytest.mark.parametrize(
    "message",
    [
        assistant(7),
        assistant([None, 3, {"type": "text"}, {"content": 4}]),
        assistant(None, tool_calls=[{"function": {"name": None, "arguments": "{"}}]),
        {"type": "function_call", "call_id": 7},
        {"type": ["reasoning"]},
    ],
)
def test_what_is_no_message_of_any_api_is_no_evidence(message: dict[str, Any]) -> None:
    assert compared({"content": TEXT}, message) is Evidence.NONE


def test_a_deeply_nested_message_is_read() -> None:
    content: Any = TEXT
    for _ in range(200):
        content = [{"type": "text", "content": content}]
    assert compared({"content": TEXT}, assistant(content)) is Evidence.NONE
