import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from proxy.recording.prefix_delta import RequestMessages, Tail, TurnDelta, packed, same, tail_of, turn_delta
from tests.unit.proxy.conftest import raw

SYSTEM, USER, ANSWERED, MORE = (
    {"role": role, "content": content}
    for role, content in (("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "more"))
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def turn(tail: Tail | None, messages: list[Any], prompt: list[int] | None, tools: Any = None) -> TurnDelta:
    request = RequestMessages([raw(message) for message in messages])
    return turn_delta(tail, request, prompt, None if tools is None else raw(tools))


def tail_after(new: TurnDelta, answer: list[int] | None, tools: Any = None) -> Tail | None:
    return tail_of("c0", new, answer, None if tools is None else raw(tools))


def stored(new: TurnDelta) -> list[Any]:
    return [json.loads(bytes(message)) for message in new.messages]


def first(tools: Any = None) -> Tail:
    tail = tail_after(turn(None, [SYSTEM, USER], [1, 2], tools), [3, 4], tools)
    assert tail is not None
    return tail


def test_a_first_turn_is_stored_whole() -> None:
    new = turn(None, [SYSTEM, USER], [1, 2], TOOLS)
    assert (new.follows, stored(new), new.prompt_token_ids) == (None, [SYSTEM, USER], [1, 2])
    assert json.loads(bytes(new.tools or b"")) == TOOLS


def test_a_turn_that_extends_the_tail_stores_only_what_it_adds() -> None:
    new = turn(first(), [SYSTEM, USER, ANSWERED, MORE], [1, 2, 3, 4, 5])
    assert (new.follows, stored(new), new.prompt_token_ids) == ("c0", [MORE], [5])


def test_the_echoed_answer_may_be_written_down_in_any_way() -> None:
    echoed = ANSWERED | {"tool_calls": [], "name": "x"}
    new = turn(first(), [SYSTEM, USER, echoed, MORE], [1, 2, 3, 4, 5])
    assert new.follows == "c0"
    tail = tail_after(new, [6])
    assert turn(tail, [SYSTEM, USER, ANSWERED, MORE, ANSWERED], [1, 2, 3, 4, 5, 6]).follows == "c0"


def test_a_turn_may_add_nothing_but_the_answer() -> None:
    new = turn(first(), [SYSTEM, USER, ANSWERED], [1, 2, 3, 4])
    assert (new.follows, stored(new), new.prompt_token_ids) == ("c0", [], [])


def test_order_of_keys_and_white_space_are_no_difference() -> None:
    assert same(raw(USER), raw(dict(reversed(USER.items()))))
    assert same(raw(USER), msgspec.Raw(json.dumps(USER, indent=1).encode()))
    assert not same(raw(USER), raw(MORE))


def test_marks_of_a_cache_move_from_message_to_message() -> None:
    part = {"type": "text", "text": "u", "cache_control": {"type": "ephemeral"}}
    marked, plain = [
        {"role": "user", "content": [part, "x"]},
        {"role": "user", "content": [{"type": "text", "text": "u"}, "x"]},
    ]
    assert same(raw(marked), raw(plain))
    assert not same(raw(marked), raw(plain | {"role": "system"}))
    tail = tail_after(turn(None, [SYSTEM, marked], [1, 2]), [3, 4])
    assert stored(turn(tail, [SYSTEM, plain, ANSWERED, MORE], [1, 2, 3, 4, 5])) == [MORE]


def test_messages_that_come_as_the_same_bytes_are_not_read_again() -> None:
    no_json = msgspec.Raw(b"no JSON")
    tail = Tail("c0", packed([1, 2, 3, 4]), [no_json], (), None)
    request = RequestMessages([no_json, raw(ANSWERED), raw(MORE)])
    assert json.loads(turn_delta(tail, request, [1, 2, 3, 4, 5], None).messages_json) == [MORE]


def test_messages_that_come_as_other_bytes_are_told_by_what_they_say() -> None:
    assert turn(first(), [SYSTEM, dict(reversed(USER.items())), ANSWERED, MORE], [1, 2, 3, 4, 5]).follows == "c0"


def test_a_tail_keeps_its_messages_and_not_the_request_that_they_came_in() -> None:
    body = bytearray(b'[{"role":"user","content":"u"}]')
    request = RequestMessages(msgspec.json.decode(body, type=list[msgspec.Raw]))
    tail = tail_of("c0", turn_delta(None, request, [1], None), [2], None)
    assert tail is not None
    body[:] = b" " * len(body)
    assert bytes(tail.messages[0]) == b'{"role":"user","content":"u"}'


def test_a_tail_has_what_the_one_before_it_had_and_its_own_of_what_came() -> None:
    before = first()
    body = bytearray(b"[%b]" % b",".join([raw(one) for one in (SYSTEM, USER, ANSWERED, MORE)]))
    request = RequestMessages(msgspec.json.decode(body, type=list[msgspec.Raw]))
    tail = tail_of("c1", turn_delta(before, request, [1, 2, 3, 4, 5], None), [6], None)
    assert tail is not None
    body[:] = b" " * len(body)
    assert [json.loads(bytes(message)) for message in tail.messages] == [SYSTEM, USER, ANSWERED, MORE]
    assert tail.messages[0] is before.messages[0]
    assert len(before.messages) == 2


def test_what_siblings_asked_is_told_from_where_each_goes_on() -> None:
    request = RequestMessages([raw(message) for message in (SYSTEM, USER, ANSWERED, MORE)])
    goes_on, afresh = (
        turn_delta(first(), request, [1, 2, 3, 4, 5], None),
        turn_delta(None, request, [1, 2, 3, 4, 5], None),
    )
    again = turn_delta(first(), request, [1, 2, 3, 4, 5], None)
    assert [json.loads(one.messages_json) for one in (goes_on, afresh, again)] == [
        [MORE],
        [SYSTEM, USER, ANSWERED, MORE],
        [MORE],
    ]


def test_a_tail_read_from_sql_is_compared_by_what_it_says_but_once() -> None:
    read = Tail("c0", packed([1, 2, 3, 4]), [msgspec.Raw(json.dumps(USER, indent=1).encode())], (), None)
    new = turn(read, [USER, ANSWERED, MORE], [1, 2, 3, 4, 5])
    tail = tail_after(new, [6])
    assert tail is not None
    assert (tail.messages, tail.answers) == ([raw(USER), raw(ANSWERED), raw(MORE)], (1,))


def test_other_token_ids_follow_nothing() -> None:
    for prompt in ([1, 2, 3], [1, 2, 3, 9, 5], [], None):
        new = turn(first(), [SYSTEM, USER, ANSWERED, MORE], prompt)
        assert (new.follows, stored(new), new.prompt_token_ids) == (None, [SYSTEM, USER, ANSWERED, MORE], prompt)


def test_other_messages_follow_nothing() -> None:
    for messages in ([SYSTEM, USER], [SYSTEM, MORE, ANSWERED, USER], [USER]):
        assert turn(first(), messages, [1, 2, 3, 4, 5]).follows is None


def test_equal_tools_are_not_stored_again() -> None:
    assert turn(first(TOOLS), [SYSTEM, USER, ANSWERED, MORE], [1, 2, 3, 4, 5], TOOLS).tools is None


def test_changed_tools_are_stored() -> None:
    new = turn(first(TOOLS), [SYSTEM, USER, ANSWERED, MORE], [1, 2, 3, 4, 5], [*TOOLS, *TOOLS])
    assert (new.follows, json.loads(bytes(new.tools or b""))) == ("c0", [*TOOLS, *TOOLS])


def test_tools_that_are_gone_follow_nothing_for_null_would_say_as_before() -> None:
    assert turn(first(TOOLS), [SYSTEM, USER, ANSWERED, MORE], [1, 2, 3, 4, 5]).follows is None


def test_unknown_ids_leave_no_tail() -> None:
    assert tail_after(turn(None, [USER], [1]), None) is None
    assert tail_after(turn(None, [USER], None), [1]) is None


MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text(max_size=5)})
IDS = st.lists(st.integers(0, 3), max_size=4)
TURN = st.tuples(st.booleans(), st.lists(MESSAGE, min_size=1, max_size=3), IDS.filter(bool), IDS, st.booleans())


@given(st.lists(TURN, max_size=6))
def test_what_is_stored_adds_up_to_what_was_asked(turns: list[Any]) -> None:
    """Some turns go on, some start over; followed back, the stored pieces are the prompts and the conversations."""
    tail: Tail | None = None
    whole: dict[str, tuple[list[int], list[Any], Any]] = {}
    prompt: list[int] = []
    messages: list[Any] = []
    answer: list[int] = []
    for number, (goes_on, new_messages, new_ids, next_answer, has_tools) in enumerate(turns):
        echo = {"role": "assistant", "content": str(number)}
        prompt, messages = ([*prompt, *answer, *new_ids], [*messages, echo, *new_messages]) if goes_on and number else (
            new_ids, new_messages
        )  # fmt: skip
        tools = TOOLS if has_tools else None
        new = turn(tail, messages, prompt, tools)
        before_ids, before_messages, before_tools = whole.get(new.follows or "", ([], [], None))
        assert before_ids + (new.prompt_token_ids or []) == prompt
        said = [messages[len(before_messages)]] if new.follows else []
        assert [*before_messages, *said, *stored(new)] == messages
        assert (before_tools if new.tools is None else json.loads(bytes(new.tools))) == tools
        completion = f"c{number}"
        whole[completion] = (prompt + next_answer, messages, tools)
        pieces = None if tools is None else raw(tools)
        tail, answer = tail_of(completion, new, next_answer, pieces), next_answer
