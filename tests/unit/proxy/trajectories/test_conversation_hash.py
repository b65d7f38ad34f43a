"""Which echoes of an answer are the answer, and which are not."""

from typing import Any

import pytest

from proxy.domain.call import NULL, Choice
from proxy.trajectories import conversation_hash as module
from proxy.trajectories.conversation_hash import (
    LONG_BYTES,
    MOST_OWNER_BYTES,
    SHORT_BYTES,
    Conversation,
    ConversationHasher,
    prompt_hash,
)
from tests.unit.proxy.conftest import raw
from whetstone.domain.conversation_hash import HASH_BYTES, MOST_PLACES, MessageReader, lookup_keys, prompt_of

QUESTION = {"role": "user", "content": "How is the weather in Oslo?"}
CALL = {"id": "chatcmpl-tool-0123456789abcdef", "type": "function"}
WEATHER = CALL | {"function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}


def asked(*messages: Any, owner: str | None = None, normalise: tuple[str, ...] = ()) -> Conversation:
    return ConversationHasher(normalise).conversation([raw(message) for message in messages], owner)


def left(message: dict[str, Any], *messages: Any, owner: str | None = None, normalise: tuple[str, ...] = ()) -> Any:
    """What this answer to those messages leaves to be found by."""
    choice = Choice(0, {"role": "assistant"} | message, "stop")
    return ConversationHasher(normalise).history(asked(*messages, owner=owner, normalise=normalise), choice)


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        ({"content": "Cold."}, {"role": "assistant", "content": "Cold."}),
        ({"content": "Cold."}, {"content": "Cold.", "role": "assistant", "refusal": None, "tool_calls": None}),
        ({"content": "\n\nCold. "}, {"role": "assistant", "content": "Cold."}),
        ({"content": "Cold."}, {"role": "assistant", "content": [{"type": "text", "text": "Cold."}]}),
        ({"content": "Cold.", "reasoning": "Oslo is in Norway"}, {"role": "assistant", "content": "Cold."}),
        ({"content": None, "tool_calls": [WEATHER]}, {"role": "assistant", "content": "", "tool_calls": [WEATHER]}),
        ({"content": "", "tool_calls": [WEATHER]}, {"role": "assistant", "tool_calls": [WEATHER]}),
        (
            {"tool_calls": [WEATHER]},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "made anew", "function": {"arguments": '{"days":2,"city":"Oslo"}', "name": "weather"}}
                ],
            },
        ),
    ],
)
def test_an_echo_is_found_however_the_app_wrote_it_down(answer: dict[str, Any], echo: dict[str, Any]) -> None:
    history = left(answer, QUESTION)
    assert history.conversation == asked(QUESTION, echo, {"role": "user", "content": "And tomorrow?"}).answers[0]


@pytest.mark.parametrize(
    "echo",
    [
        {"role": "assistant", "content": "Warm."},
        {"role": "user", "content": "Cold."},
        {"role": "assistant", "content": "Cold.", "tool_calls": [WEATHER]},
        {"role": "assistant", "content": [{"type": "text", "text": "Cold."}, {"type": "image_url", "image_url": {}}]},
    ],
)
def test_what_was_not_said_is_not_found(echo: dict[str, Any]) -> None:
    assert left({"content": "Cold."}, QUESTION).conversation not in asked(QUESTION, echo, QUESTION).answers


def test_an_answer_is_found_after_its_own_question_only() -> None:
    history = left({"content": "Cold."}, QUESTION)
    other = {"role": "user", "content": "How is the weather in Rome?"}
    assert history.conversation not in asked(other, {"role": "assistant", "content": "Cold."}).answers


def test_no_two_cuts_of_the_same_text_are_one_conversation() -> None:
    first = asked({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert first.whole != asked({"role": "user", "content": "ab"}).whole
    assert first.whole != asked({"role": "user", "content": "b"}, {"role": "user", "content": "a"}).whole


def test_of_two_users_with_the_same_words_each_finds_his_own() -> None:
    echo = {"role": "assistant", "content": "Cold."}
    history = left({"content": "Cold."}, QUESTION, owner="ann").conversation
    assert history in asked(QUESTION, echo, owner="ann").answers
    assert history not in asked(QUESTION, echo, owner="bob").answers
    assert asked(QUESTION, owner="ann").whole == asked(QUESTION, owner="bob").whole


def test_tool_calls_are_found_by_their_ids_whatever_stands_before_them() -> None:
    history = left({"content": "Let me see.", "tool_calls": [WEATHER]}, QUESTION)
    told = {"role": "tool", "tool_call_id": CALL["id"], "content": "2 degrees"}
    changed = {"role": "system", "content": "It is 12:31."}
    later = asked(changed, QUESTION, {"role": "assistant", "tool_calls": [WEATHER]}, told)
    assert history.tool_calls == later.tool_calls
    assert history.conversation not in later.answers


@pytest.mark.parametrize("call_id", [None, "", 7, "functions.weather:0", "weather_0"])
def test_a_tool_call_id_that_anybody_may_have_finds_nothing(call_id: Any) -> None:
    assert left({"tool_calls": [WEATHER | {"id": call_id}]}, QUESTION).tool_calls is None


def test_an_empty_answer_may_be_gone_on_from_but_none_may_not() -> None:
    assert (
        left({"content": None}, QUESTION).conversation in asked(QUESTION, {"role": "assistant", "content": ""}).answers
    )
    nothing = Choice(0, {})
    assert ConversationHasher().history(asked(QUESTION), nothing).hashes == ()


def test_what_the_normaliser_matches_does_not_count() -> None:
    clock = (r"\d\d:\d\d",)
    early, late = ({"role": "system", "content": f"It is {time}."} for time in ("09:30", "17:45"))
    echo = {"role": "assistant", "content": "Cold."}
    history = left({"content": "Cold."}, early, QUESTION, normalise=clock).conversation
    assert history in asked(late, QUESTION, echo, normalise=clock).answers
    assert history not in asked(late, QUESTION, echo).answers


def test_only_the_last_answers_of_a_long_conversation_are_looked_for() -> None:
    turns = [message for _ in range(100) for message in (QUESTION, {"role": "assistant", "content": "Cold."})]
    answers = asked(*turns).answers
    assert len(answers) == MOST_PLACES
    assert answers[0] == asked(*turns, QUESTION).answers[0]
    assert answers[1] == asked(*turns[:-2]).answers[0]


@pytest.mark.parametrize(
    "message",
    [None, 3, "text", [], {}, {"role": 3}, {"role": "assistant", "tool_calls": 7},
     {"role": "assistant", "tool_calls": [1]},
     {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}], "content": [3, {"type": "text"}]},
     {"role": "assistant", "function_call": {"name": "f", "arguments": 1}}],
)  # fmt: skip
def test_what_is_no_message_is_hashed_all_the_same(message: Any) -> None:
    assert len(asked(message, QUESTION).whole) == 16


def test_first_prompts_are_alike_with_the_same_tools_and_task_only() -> None:
    tools = raw([{"type": "function", "function": {"name": "weather"}}])
    reordered = raw([{"function": {"name": "weather"}, "type": "function"}])
    hashes = [
        prompt_hash(asked(QUESTION), tools, None),
        prompt_hash(asked(QUESTION), raw(None), None),
        prompt_hash(asked(QUESTION), tools, "weather"),
        prompt_hash(asked(QUESTION, QUESTION), tools, None),
    ]
    assert len(set(hashes)) == 4
    assert prompt_hash(asked(QUESTION), reordered, None) == hashes[0]


def test_a_pattern_that_takes_too_long_leaves_the_text_as_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    endless, text = r"(?:a|aa)+$", "a" * 60 + "b"
    messages = [raw({"role": "user", "content": f"{place}{text}"}) for place in range(20)]
    normaliser = ConversationHasher([endless], timeout_s=0.01)
    assert normaliser.conversation(messages, None) == ConversationHasher().conversation(messages, None)
    assert normaliser.conversation(messages[:1], None) == ConversationHasher().conversation(messages[:1], None)
    assert caplog.text.count("proxy.normalise") == 1


def test_hashes_are_those_that_databases_have() -> None:
    echo = {"role": "assistant", "content": " Cold. ", "tool_calls": [WEATHER]}
    found, tools = asked(QUESTION, echo, owner="ann"), raw([{"type": "function", "function": {"name": "weather"}}])
    assert found.whole.hex() == "1594851c56dd1be7a19a23fc7cc19799"
    assert [one.hex() for one in found.lookup_keys] == [
        "0911501a8cf2cdd126e69a9fd342ef86",
        "f4f4cf4f8607efdbb739fbb624df48d6211c41d7",
    ]
    assert prompt_hash(found, tools, "weather") == "71051fea235b969c0aa11107f9a2acb9"


@pytest.mark.parametrize("length", [0, 10, SHORT_BYTES - 50, SHORT_BYTES + 50, LONG_BYTES - 50, LONG_BYTES + 50])
@pytest.mark.parametrize("owner", ["ann", "a" * (MOST_OWNER_BYTES + 1)])
def test_a_conversation_that_grows_comes_to_the_same_as_one_that_is_new(length: int, owner: str) -> None:
    """Whatever is remembered of the turns before, and however little may be."""
    turns: list[Any] = []
    for place in range(6):
        turns += [{"role": "user", "content": f"{place}" * length}, {"role": "assistant", "content": "C" * length}]
    for most_cached, keeps_texts in ((0, True), (3, True), (1000, True), (1000, False)):
        normaliser = ConversationHasher(most_cached=most_cached, keeps_texts=keeps_texts)
        for end in range(1, len(turns) + 1):
            messages = [raw(message) for message in turns[:end]]
            grown, new = normaliser.conversation(messages, owner), ConversationHasher().conversation(messages, owner)
            assert grown == new
            turns_of = MessageReader().turns(turns[:end], owner)
            assert (grown.whole, list(grown.lookup_keys)) == (turns_of[-1].whole, lookup_keys(turns_of))
            left_by = Choice(0, {"role": "assistant", "content": f"{end}"}, "stop")
            assert normaliser.history(grown, left_by) == ConversationHasher().history(new, left_by)


def test_what_is_known_of_a_message_is_of_the_conversation_and_the_owner_it_was_seen_with() -> None:
    """The same words stand in many conversations, and again and again in one."""
    question, answer = raw({"role": "user", "content": "Go on."}), raw({"role": "assistant", "content": "Done."})
    other = raw({"role": "user", "content": "Stop."})
    talks = [[question, answer], [other, answer], [question, answer, question, answer], [answer, answer, answer]]
    normaliser = ConversationHasher()
    for talk in talks * 2:
        for owner in ("ann", "bob", None, "ann"):
            assert normaliser.conversation(talk, owner) == ConversationHasher().conversation(talk, owner)


@pytest.mark.parametrize("given_to", ["ann", "bob", "a" * (MOST_OWNER_BYTES + 1)])
@pytest.mark.parametrize("owner", ["ann", "bob", "a" * (MOST_OWNER_BYTES + 1)])
@pytest.mark.parametrize("question", [QUESTION, {"role": "user", "content": "And in Rome?"}])
def test_a_given_answer_is_known_only_where_and_for_whom_it_was_given(given_to: str, owner: str, question: Any) -> None:
    said = {"role": "assistant", "tool_calls": [WEATHER]}
    with_other_ids = said | {"tool_calls": [WEATHER | {"id": "chatcmpl-tool-fedcba9876543210"}]}
    for echo in (said, with_other_ids):
        normaliser, talk = ConversationHasher(), [raw(QUESTION), raw(echo)]
        normaliser.history(normaliser.conversation([raw(question)], given_to), Choice(0, said, "stop"))
        assert len(normaliser._given) == (len(given_to) <= MOST_OWNER_BYTES), "what takes much memory is not kept"
        assert normaliser.conversation(talk, owner) == ConversationHasher().conversation(talk, owner)
        assert not normaliser._given, "it is known as a message now"


def test_where_a_given_answer_stands_is_not_hashed_again_in_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counted(told: bytes) -> bytes:
        hashed.append(told)
        return make(told)

    make = module.hash_of
    monkeypatch.setattr(module, "hash_of", counted)
    normaliser, echo = ConversationHasher(), {"role": "assistant", "content": "Cold."}
    normaliser.history(normaliser.conversation([raw(QUESTION)], "ann"), Choice(0, echo, "stop"))
    hashed.clear()
    normaliser.conversation([raw(QUESTION), raw(echo)], "ann")
    assert hashed == []


def test_what_is_known_of_messages_stays_bounded() -> None:
    normaliser = ConversationHasher(most_cached=32)
    for place in range(100):
        asked_one = normaliser.conversation([raw({"role": "user", "content": str(place)})], None)
        normaliser.history(asked_one, Choice(0, {"role": "assistant", "content": str(place)}, "stop"))
    assert 16 < len(normaliser._read_before) <= 32
    assert 4 < len(normaliser._given) <= 8


def test_where_texts_are_not_to_be_kept_messages_are_known_by_hashes_alone() -> None:
    for length in (1, SHORT_BYTES - 50, LONG_BYTES - 50):
        normaliser = ConversationHasher(keeps_texts=False)
        normaliser.conversation([raw({"role": "user", "content": "s" * length})], None)
        assert [len(key) for key in normaliser._read_before] == [HASH_BYTES]
        assert normaliser._hash_of.cache_info().currsize == 0


def test_what_one_normaliser_knows_another_with_other_patterns_does_not() -> None:
    late, early = ({"role": "user", "content": f"It is {time}."} for time in ("17:45", "09:30"))
    assert asked(late, normalise=(r"\d\d:\d\d",)) == asked(early, normalise=(r"\d\d:\d\d",))
    assert asked(late) != asked(early)


PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Write a poem"},
    {"prompt": "What is 2+2?"},
    {"prompt": [1, 2, 3]},
    {"prompt": [1, 2]},
    {"prompt": ""},
    {},
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"role": "user", "content": ""},
]


def test_what_is_no_message_says_what_its_fields_say() -> None:
    """A text's prompt, and an item of a dialect that is passed on: they have no role and no content."""
    assert len({asked(prompt).whole for prompt in PROMPTS}) == len(PROMPTS)
    assert len({asked(QUESTION, prompt, QUESTION).whole for prompt in PROMPTS}) == len(PROMPTS)
    assert len({prompt_hash(asked(prompt), NULL, None) for prompt in PROMPTS}) == len(PROMPTS)


def test_what_a_server_adds_to_an_item_does_not_count() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    assert asked(item | {"id": "fc_1", "status": "completed", "namespace": None}).whole == asked(item).whole


def test_what_normalise_matches_does_not_count_in_a_prompt_alone() -> None:
    clock = (r"It is \d+:\d+\.",)
    early, late = ({"prompt": f"It is {time}. Go on."} for time in ("9:00", "10:30"))
    assert asked(early, normalise=clock).whole == asked(late, normalise=clock).whole
    assert asked(early).whole != asked(late).whole


def test_histories_of_answers_to_one_prompt_begin_alike_and_no_others_do() -> None:
    first, second = {"role": "assistant", "content": "Cold."}, {"role": "assistant", "content": "Warm."}
    given = left({"content": "Cold, they say."}, QUESTION, owner="ann").conversation
    talk = asked(QUESTION, first, QUESTION, second, QUESTION, owner="ann").answers
    other = left({"content": "Hot."}, QUESTION, first, QUESTION, owner="ann").conversation
    assert given is not None and other is not None
    assert [prompt_of(one) for one in talk] == [prompt_of(other), prompt_of(given)]
    assert prompt_of(given) != prompt_of(other)
    assert {given, other}.isdisjoint(talk)
    assert prompt_of(given) not in {prompt_of(one) for one in asked(QUESTION, first, owner="bob").answers}
    long = "o" * 1000
    assert left(first, QUESTION, owner=long).conversation == asked(QUESTION, first, owner=long).answers[0]


TOOL_USE = {"type": "tool_use", "id": "toolu_0123456789abcdefABCDEFGH", "name": "weather", "input": {"city": "Oslo"}}
FUNCTION_CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_0123456789abcdef", "name": "weather"}


def test_tool_calls_of_an_answer_that_was_passed_on_are_found_by_their_ids() -> None:
    """However the app writes them down: with a mark for caching, without a status, one item after the other."""
    streamed = {**TOOL_USE, "input": {}, "partial_json": '{"city": "Oslo"}'}
    echo = {"role": "assistant", "content": [TOOL_USE | {"cache_control": {"type": "ephemeral"}}]}
    made = [
        FUNCTION_CALL | {"arguments": "{}"},
        FUNCTION_CALL | {"call_id": "call_fedcba9876543210", "arguments": "{}"},
    ]
    for answer in (TOOL_USE, streamed):
        assert (
            left({"content": [answer]}, QUESTION).tool_calls == asked(QUESTION, echo, QUESTION).tool_calls is not None
        )
    answer = {"content": [one | {"status": "completed"} for one in made]}
    assert left(answer, QUESTION).tool_calls == asked(QUESTION, *made, QUESTION).tool_calls is not None
    assert asked(QUESTION, {"type": "reasoning", "summary": []}, QUESTION).tool_calls is None
