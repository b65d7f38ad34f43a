"""Stored turns, as the lines that a judge reads."""

import json
import re

import pytest

from judge.decisions.model import Turn
from judge.ruler.conversation import conversation, shared

SYSTEM = {"role": "system", "content": "You are terse."}
USER = {"role": "user", "content": "What is on the calendar?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
PNG = "iVBORw0KGgo" * 30
REPORT = "The report of 2024: " + "all is well, but Ann and Bob disagree. " * 20
KEBAB = "the-report-says-" * 20
PATH = "/home/ann/projects/reports/drafts/" * 10
HEX = "0123456789abcdef" * 16


def turn(*messages, extends=False, says="Done.", tools=None, **answer):
    return Turn(extends, list(messages), {"role": "assistant", "content": says} | answer, None, tools)


def call(call_id, **fields):
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}} | fields


def result(call_id, content="free"):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def looked(call_id, says="Done."):
    """A trajectory that calls a tool, and then says something."""
    first = turn(SYSTEM, USER, says=None, tool_calls=[call(call_id)], tools=TOOLS)
    return conversation("t", [first, turn(result(call_id), extends=True, says=says)])


def said(one):
    return [json.loads(line) for line in one.lines]


def told(*messages, **answer):
    return said(conversation("t", [turn(*messages, **answer)]))


def test_turns_that_extend_are_one_conversation():
    one = conversation("t-1", [turn(SYSTEM, USER), turn({"role": "user", "content": "And?"}, extends=True, says="No.")])
    assert one.trajectory_id == "t-1"
    assert said(one) == [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
    ]
    assert all(line.startswith('{"role":') for line in one.lines)


def test_what_differs_by_accident_is_equal():
    one, other = looked("call_8f3a91c2d"), looked("chatcmpl-tool-77ab")
    assert one == other
    assert [json.loads(one.lines[n])[key] for n, key in ((2, "tool_calls"), (3, "tool_call_id"))] == [
        [{"function": {"arguments": "{}", "name": "look"}, "id": "call-1", "type": "function"}],
        "call-1",
    ]
    assert looked("call_8f3a91c2d", says="Nothing.").digest != one.digest


def test_calls_are_numbered_in_the_order_they_appear():
    lines = told(
        {"role": "assistant", "tool_calls": [call("b"), call("a")]}, result("a"), result("b"), result("unknown")
    )
    assert [one["id"] for one in lines[0]["tool_calls"]] == ["call-1", "call-2"]
    assert [one["tool_call_id"] for one in lines[1:4]] == ["call-2", "call-1", "call-3"]


def test_ids_of_anthropic_and_of_responses_are_numbered_too():
    lines = told(
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"id": 7}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "free"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_x", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_x", "output": "free"},
    )
    assert lines[0]["content"] == [{"type": "tool_use", "id": "call-1", "name": "look", "input": {"id": 7}}]
    assert lines[1]["content"][0]["tool_use_id"] == "call-1"
    assert lines[2] == {"type": "function_call", "call_id": "call-2", "name": "look", "arguments": "{}"}
    assert lines[3]["call_id"] == "call-2"


def test_what_vllm_adds_and_leaves_empty_is_dropped():
    empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": [], "id": "m-1"}
    assert told(USER, **empty)[1] == {"role": "assistant", "content": "Done."}


def test_an_empty_content_stays_unless_a_call_says_it_all():
    assert told(USER, says=None)[1] == told(USER, says="")[1] == {"role": "assistant", "content": ""}
    assert told(result("a", content=""))[0]["content"] == ""
    assert told(USER, says="", tool_calls=[call("a")])[1].keys() == {"role", "tool_calls"}


def test_a_text_in_a_list_of_one_part_is_a_text():
    assert told({"role": "user", "content": [{"type": "text", "text": "Hi"}]})[0]["content"] == "Hi"
    two = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert told({"role": "user", "content": two})[0]["content"] == two


def test_the_tools_that_were_said_last_count():
    assert looked("a").tools == json.dumps(TOOLS, sort_keys=True, separators=(",", ":"))
    again = [turn(USER, tools=TOOLS), turn(extends=True, tools=[{"type": "other"}]), turn(extends=True)]
    assert conversation("t", again).tools == '[{"type":"other"}]'
    assert conversation("t", [turn(USER)]).tools is None
    assert conversation("t", [turn(USER)]).digest != conversation("t", [turn(USER, tools=TOOLS)]).digest


def test_a_new_prompt_begins_with_a_note_and_without_what_is_known():
    one = conversation("t", [turn(SYSTEM, USER), turn(SYSTEM, {"role": "user", "content": "Other"}, says="No.")])
    assert said(one)[2:] == [
        {"role": "assistant", "content": "Done."},
        {"note": "the app began a new prompt"},
        {"role": "user", "content": "Other"},
        {"role": "assistant", "content": "No."},
    ]


def test_a_new_prompt_that_sends_the_conversation_again_under_new_ids_is_told_once():
    turns = [turn(USER, says=None, tool_calls=[call("a")]), turn(result("a"), extends=True)]
    same = [USER, {"role": "assistant", "content": "", "tool_calls": [call("z")]}, result("z")]
    again = turn(*same, {"role": "user", "content": "Sure?"}, says="Yes.")
    assert [one.get("content", one.get("note")) for one in said(conversation("t", [*turns, again]))[3:]] == [
        "Done.",
        "the app began a new prompt",
        "Sure?",
        "Yes.",
    ]


def test_a_message_cannot_pass_for_a_note_of_ours():
    lines = told({"note": "left out"}, {"role": "user", "note": "x"}, "bare", None, 5)
    assert [one["message"] for one in lines[:5]] == [
        {"note": "left out"},
        {"note": "x", "role": "user"},
        "bare",
        None,
        5,
    ]


def test_who_answered_is_the_assistant_whatever_the_answer_says_of_itself():
    assert told(USER, role="system")[1]["role"] == "assistant"


def test_text_completions_are_read():
    turns = [Turn(False, [{"prompt": "2+2="}, {"prompt": [1, 2, 3]}], None, "4", None)]
    assert said(conversation("t", turns)) == [
        {"prompt": "2+2="},
        {"prompt": "[3 token ids]"},
        {"role": "assistant", "content": "4"},
    ]


def test_a_turn_without_an_answer_and_a_trajectory_without_turns():
    assert said(conversation("t", [Turn(False, [USER], None, None, None)])) == [USER]
    assert conversation("t", []).lines == ()


def test_a_judge_reads_text_only():
    url = f"data:image/png;base64,{PNG}"
    lines = told(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]},
        {"role": "user", "content": f"Look: ![x]({url}) nice"},
        {"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
            {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
        ]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "x"]},
    )  # fmt: skip
    same = lines[0]["content"][0]["image_url"]["url"]
    assert same.startswith("[image/png, 247 bytes, ")
    assert lines[1]["content"] == f"Look: ![x]({same}) nice"
    assert lines[2]["content"][0]["source"]["data"] == same
    assert lines[2]["content"][1]["input_audio"]["data"].startswith("[wav, 247 bytes, ")
    assert lines[3]["content"][0]["image_url"]["url"] == "https://example.com/a.png"
    assert told({"role": "user", "content": url.replace("iV", "jV")})[0]["content"] != same


@pytest.mark.parametrize("data", [REPORT, KEBAB, PATH, HEX, "short4Word", "Ünïcode1" * 40, PNG + " and words"])
@pytest.mark.parametrize("kind", [{"format": "markdown"}, {"media_type": "text/plain"}, {"media_type": "image/png"}])
def test_a_text_is_shown_whatever_the_fields_around_it_are_called(data, kind):
    filed = kind | {"data": data}
    called = {"type": "tool_use", "id": "toolu_1", "name": "file", "input": filed}
    lines = told(
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [filed]},
        {"role": "user", "content": {"deep": [filed]}},
        filed,
    )
    assert lines[0]["content"][0]["input"] == filed
    assert lines[1]["content"] == [filed]
    assert lines[2]["content"] == {"deep": [filed]}
    assert lines[3] == filed


@pytest.mark.parametrize(
    "text",
    [
        f"data:text/plain;base64,{KEBAB}",
        f"data:text/plain;base64,{PATH}",
        f"data:text/plain;the_report_says_that_all_is_well;base64,{PNG}",
        f"data:{'report' * 20}/x;base64,{PNG}",
        f"data:image/png;base64,{PNG[:20]} {REPORT}",
    ],
)
def test_what_only_looks_like_a_data_url_is_shown(text):
    assert told({"role": "user", "content": text})[0]["content"] == text


@pytest.mark.parametrize("data", [PNG + "a=", PNG + "%2Fa%3D%3D", PNG.replace("KG", "-_")], ids=["std", "%", "url"])
def test_a_data_url_in_either_alphabet_is_bytes(data):
    text = told({"role": "user", "content": f"<data:image/png;name=a.png;base64,{data}> The report"})[0]["content"]
    assert re.fullmatch(r"<\[image/png, \d+ bytes, \w{6}\]> The report", text)


def test_a_text_in_a_field_of_bytes_or_of_an_id_is_shown():
    fields = {"signature": REPORT, "encrypted_content": "yes"}
    part = {"type": "thinking", "thinking": "Hm."} | fields
    lines = told(
        {"role": "assistant", "content": [part], **fields},
        {"role": "user", "content": "x", "id": REPORT},
        {"role": "tool", "tool_call_id": REPORT, "content": "x"},
    )
    assert lines[0] == {"role": "assistant", "content": [part], **fields}
    assert lines[1]["id"] == lines[2]["tool_call_id"] == REPORT


def test_a_field_nested_too_deeply_hides_no_other():
    deep = []
    for _ in range(5000):
        deep = [deep]
    says = {"type": "text", "text": REPORT}
    lines = told(
        {"role": "assistant", "content": [says, {"type": "tool_use", "name": "look", "input": deep}]},
        {"role": "assistant", "content": REPORT, "extra": deep},
    )
    assert lines[0]["content"][0] == says
    assert lines[1] == {
        "role": "assistant",
        "content": REPORT,
        "extra": "what stood here is nested too deeply to be shown",
    }


def test_what_nobody_can_read_is_dropped():
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "EqQB" * 100}
    lines = told({"role": "assistant", "content": [thought]}, {"type": "reasoning", "encrypted_content": "gAAA"})
    assert lines[:2] == [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
        {"type": "reasoning"},
    ]


def test_what_an_app_nests_too_deeply_costs_only_its_line():
    deep = []
    for _ in range(5000):
        deep = [deep]
    lines = told({"role": "user", "content": {"x": deep}})
    assert [one.get("note", one.get("content")) for one in lines] == [
        "what stood here is nested too deeply to be shown",
        "Done.",
    ]


def test_odd_characters_stay_on_their_line():
    text = "a\nb\u2028c\x00\ud800\U000e0041"
    one = conversation("t", [turn({"role": "user", "content": text})])
    assert said(one)[0]["content"] == text
    assert len(one.lines) == 2
    assert len(one.digest) == 16


def test_what_all_begin_with_is_shared_by_whole_messages():
    one, other = looked("a"), looked("b", says="Nothing.")
    assert shared([one, other]) == 4
    assert shared([one, other, conversation("t", [turn(SYSTEM, USER)])]) == 2
    assert shared([one, conversation("t", [turn(USER)])]) == 0
    assert shared([one, conversation("t", [])]) == 0
    assert shared([]) == 0


def test_each_keeps_its_last_line_to_be_judged_by():
    one = looked("a")
    assert shared([one]) == shared([one, one]) == len(one.lines) - 1
    ends_early = conversation("t", [turn(SYSTEM, USER, says=None, tool_calls=[call("a")])])
    assert shared([one, ends_early]) == 2
