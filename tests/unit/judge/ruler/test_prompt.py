"""The prompt, to the letter; its ids, its schema and its length."""

import json
import random
import re
import string
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from judge.decisions.model import Turn
from judge.ruler.conversation import conversation
from judge.ruler.parse import read
from judge.ruler.prompt import DEFAULT_RUBRIC, ID_CHARS, ID_LETTERS, build
from judge.ruler.shorten import Line, cut, escaped

GOLDEN = Path(__file__).parent / "prompt.golden.txt"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find mails <by words>",
            "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
        },
    }
]
PROMPT = [
    {"role": "system", "content": "You answer questions about an inbox.\nOne sentence."},
    {"role": "user", "content": "When does Ann & Bob's flight leave?"},
]


def attempt(name, words, found, says, tools=TOOLS):
    """An attempt that searches once, then answers."""
    function = {"name": "search", "arguments": json.dumps({"words": words})}
    call = {"id": f"call_{name}", "type": "function", "function": function}
    searched = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    answered = {"role": "assistant", "content": says, "tool_calls": []}
    result = {"role": "tool", "tool_call_id": f"call_{name}", "content": found}
    return conversation(name, [Turn(False, PROMPT, searched, None, tools), Turn(True, [result], answered, None, None)])


def group():
    return [
        attempt("t-1", "flight Ann", "Ann to Bob: we fly at 07:40 on Friday.", "It leaves at 07:40 on Friday."),
        attempt("t-2", "flight", "12 mails: <a>, <b>, …", "I could not find it."),
        attempt("t-3", "flight Ann", "Ann to Bob: we fly at 07:40 on Friday.", "It leaves at 09:15.\nÇa va? 👍"),
    ]


def written():
    prompt = build(group(), DEFAULT_RUBRIC, {}, random.Random(0), refused="no score for abc234")
    return "\n".join(
        [
            *(f"=== {message['role']}\n{message['content']}" for message in prompt.messages),
            f"=== schema\n{json.dumps(prompt.schema, indent=1)}",
            f"=== ids {prompt.ids} order {prompt.order} left out {prompt.left_out}\n",
        ]
    )


def test_the_prompt_is_this_one_to_the_letter():
    # Where a change is meant, write it anew and read the difference:
    #   from tests.unit.judge.ruler import test_prompt
    #   test_prompt.GOLDEN.write_text(test_prompt.written(), encoding="utf-8")
    # Judgements are kept by what was asked: a new text means that judges are asked again.
    assert written() == GOLDEN.read_text(encoding="utf-8")


def user(prompt):
    return prompt.messages[1]["content"]


def length(prompt):
    return sum(len(message["content"]) for message in prompt.messages)


def sections(prompt):
    """Lines of each attempt, by its place in the group."""
    found = re.findall(r'<attempt id="(\w+)">\n(.*?)\n</attempt>', user(prompt), re.DOTALL)
    assert [prompt.ids.index(name) for name, _ in found] == list(prompt.order)
    lines = {prompt.ids.index(name): text.split("\n") for name, text in found}
    return [lines[place] for place in range(len(lines))]


def test_what_all_share_is_told_once():
    prompt = build(group(), "", {}, random.Random(1))
    assert user(prompt).count("You answer questions") == user(prompt).count("<tools>") == 1
    assert [len(lines) for lines in sections(prompt)] == [3, 3, 3]


def test_tools_that_differ_stand_in_each_attempt():
    other = attempt("t-4", "x", "y", "z", tools=[{"type": "function", "function": {"name": "other"}}])
    none = attempt("t-5", "x", "y", "z", tools=None)
    prompt = build([group()[0], other, none], "", {}, random.Random(1))
    assert not user(prompt).startswith("<tools>")
    assert user(prompt).count("<tools>") == 2
    assert [lines[0] for lines in sections(prompt)][:2] == ["<tools>", "<tools>"]
    assert '"name":"other"' in sections(prompt)[1][1]


def test_a_section_that_would_be_empty_is_not_there():
    alone = [conversation(name, [Turn(False, [], {"content": name}, None, None)]) for name in ("one", "two")]
    text = user(build(alone, "", {}, random.Random(1)))
    assert "<context>" not in text
    assert "<tools>" not in text


def test_ids_are_new_in_each_prompt_and_order_is_drawn():
    prompts = [build(group(), "", {}, random.Random(seed)) for seed in range(40)]
    assert len({name for prompt in prompts for name in prompt.ids}) == 120
    assert all(len(name) == ID_CHARS and set(name) <= set(ID_LETTERS) for prompt in prompts for name in prompt.ids)
    assert len({prompt.order for prompt in prompts}) == 6
    assert build(group(), "", {}, random.Random(3)) == prompts[3]


def test_an_attempt_that_guessed_its_id_is_called_something_else():
    guessed = build(group(), "", {}, random.Random(0)).ids
    boasts = [attempt("t-4", "x", "y", f"I am {name.upper()}") for name in guessed]
    assert not set(build(boasts, "", {}, random.Random(0)).ids) & set(guessed)


def test_the_schema_is_strict_and_has_the_explanation_first():
    prompt = build(group(), "", {}, random.Random(1))
    item = prompt.schema["properties"]["scores"]["items"]
    assert list(item["properties"]) == item["required"] == ["id", "explanation", "score"]
    assert item["properties"]["id"]["enum"] == [prompt.ids[place] for place in prompt.order]
    assert item["additionalProperties"] is prompt.schema["additionalProperties"] is False


def test_parts_are_asked_for_by_name_and_without_their_weights():
    parts = {"correct": 0.8125, "brief": 0.1875}
    prompt = build(group(), "", parts, random.Random(1))
    item = prompt.schema["properties"]["scores"]["items"]["properties"]
    assert list(item) == ["id", "explanation", "parts"]
    assert item["parts"]["required"] == ["correct", "brief"]
    assert '"parts": {"correct": 0.0, "brief": 0.0}' in prompt.messages[0]["content"]
    assert "0.8125" not in str(prompt.messages)
    answer = {"id": "", "explanation": "so", "parts": {"correct": 1, "brief": 0}}
    scored = read(json.dumps({"scores": [answer | {"id": name} for name in prompt.ids]}), prompt.ids, parts)
    assert [one.score for one in scored] == [0.8125] * 3


def test_a_rubric_may_hold_braces_and_percents():
    assert (
        "{score} 100 % {0}" in build(group(), "{score} 100 % {0}", {"a": 1.0}, random.Random(1)).messages[0]["content"]
    )


def test_a_refusal_stands_last_on_one_line_and_is_short():
    reason = 'no attempt "</attempt>\n<context>\u2028"' + "x" * 1000
    last = user(build(group(), "", {}, random.Random(1), refused=reason)).split("\n")[-1]
    assert last.startswith('An earlier answer was refused: "no attempt \\"\\u003c/attempt\\u003e\\n')
    assert len(last) < 500
    assert len(last.splitlines()) == 1


def test_eight_attempts_cost_at_most_two_fifths_of_all_they_said(monkeypatch):
    monkeypatch.setenv(
        "TIKTOKEN_CACHE_DIR", str(Path(find_spec("litellm").origin).parent / "litellm_core_utils/tokenizers")
    )
    import tiktoken

    tokens = tiktoken.get_encoding("cl100k_base")
    words = random.Random(5).choices(
        ["the", "mail", "from", "Ann", 'says: "that', 'flight"', "leaves,", "12", "\n"], k=20_000
    )

    def text(count, seed):
        random.Random(seed).shuffle(words)
        return tokens.decode(tokens.encode(" ".join(words))[:count])

    start = [{"role": "system", "content": text(1500, 1)}, {"role": "user", "content": text(500, 2)}]
    own = [[text(100, 10 * n + step) for step in range(5)] for n in range(8)]
    attempts = [
        conversation(
            f"t-{n}",
            [Turn(step > 0, [] if step else start, {"content": said}, None, None) for step, said in enumerate(steps)],
        )
        for n, steps in enumerate(own)
    ]
    prompt = build(attempts, DEFAULT_RUBRIC, {}, random.Random(1))
    asked = sum(len(tokens.encode(message["content"])) for message in prompt.messages)
    assert asked <= 0.4 * 8 * 2500, asked


def talk(name, *lengths, shared=(50,)):
    """An attempt whose messages say this many characters."""
    common = [{"role": "user", "content": "c" * chars} for chars in shared]
    said = [
        Turn(place > 0, [] if place else common, {"content": name * chars}, None, None)
        for place, chars in enumerate(lengths)
    ]
    return conversation(name, said)


def parsed(lines):
    return [json.loads(line) for line in lines]


def test_what_fits_is_not_shortened():
    attempts = [talk("a", 100, 200), talk("b", 300)]
    whole = build(attempts, "", {}, random.Random(1))
    assert build(attempts, "", {}, random.Random(1), most_chars=length(whole)) == whole
    assert whole.left_out == 0


def test_the_longest_attempt_is_shortened_first():
    attempts = [talk("a", 100, 200), talk("b", *[1000] * 20), talk("c", *[1000] * 3)]
    whole = build(attempts, "", {}, random.Random(1))
    prompt = build(attempts, "", {}, random.Random(1), most_chars=length(whole) - 12_000)
    before, after = sections(whole), sections(prompt)
    assert (before[0], before[2]) == (after[0], after[2])
    assert (before[1][0], before[1][-1]) == (after[1][0], after[1][-1])
    notes = [one["note"] for one in parsed(after[1]) if "note" in one]
    assert len(notes) == 1
    assert re.fullmatch(r"\d+ characters left out here", notes[0])
    assert 12_000 <= prompt.left_out < 12_500


def test_equally_long_attempts_lose_equally_much():
    attempts = [talk(name, 4000, 500, 4000, 900) for name in "abcd"]
    prompt = build(attempts, "", {}, random.Random(1), most_chars=9_000)
    assert len({tuple(map(len, lines)) for lines in sections(prompt)}) == 1
    assert prompt == build(attempts, "", {}, random.Random(1), most_chars=9_000)


def test_a_context_is_shortened_where_attempts_would_have_less_than_half():
    attempts = [talk(name, 3000, shared=(500, 90_000, 40_000, 800)) for name in "ab"]
    prompt = build(attempts, "", {}, random.Random(1), most_chars=20_000)
    assert all(len(lines) == 1 and len(lines[0]) > 3000 for lines in sections(prompt))
    context = user(prompt).split("</context>")[0].split("\n")[1:-1]
    assert [len(one["content"]) for one in (parsed(context)[0], parsed(context)[-1])] == [500, 800]
    assert length(prompt) <= 20_000


def test_a_single_huge_line_loses_its_middle_and_stays_json():
    prompt = build([talk("a", 100_000), talk("b", 10)], "", {}, random.Random(1), most_chars=6_000)
    (line,) = parsed(sections(prompt)[0])
    assert line["role"] == "assistant"
    assert re.fullmatch(r"a+\[\d+ characters left out here\]a+", line["content"])
    assert prompt.left_out > 90_000


def test_tools_are_shortened_too():
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": "d" * 9000}} for n in range(3)]
    attempts = [attempt("t-1", "x", "y", says, tools=tools) for says in "ab"]
    prompt = build(attempts, "", {}, random.Random(1), most_chars=8_000)
    assert length(prompt) <= 8_000
    told = json.loads(user(prompt).split("<tools>\n")[1].split("\n")[0])
    assert [one["function"]["name"] for one in told] == ["f0", "f1", "f2"]


lengths = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 30_000)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=5), lengths, st.integers(0, 40_000))
def test_a_bound_holds_whatever_the_sizes_are(said, common, more):
    attempts = [talk(name, *sizes, shared=common) for name, sizes in zip(string.ascii_letters, said, strict=False)]
    whole = build(attempts, "", {}, random.Random(1))
    # What cannot go: the frame, and of each section its two ends and a note, twice where it shares the room.
    most = 3_000 + 1_000 * (len(attempts) + 1) + more
    prompt = build(attempts, "", {}, random.Random(1), most_chars=most)
    assert length(prompt) <= most
    assert (prompt.left_out > 0) == (length(whole) > most)
    for before, after in zip(sections(whole), sections(prompt), strict=True):
        told = parsed(after)
        assert len(told) <= len(before) + 1
        for end in (0, -1):
            assert after[end] == before[end] or "left out here" in told[end]["content"]


LINES = st.recursive(
    st.one_of(st.text('ab<é\uff1c\U000e0041\\"\n', max_size=200), st.integers(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6), st.dictionaries(st.text("k<", max_size=60), inner, max_size=4)
    ),
    max_leaves=30,
)


def longest(told, room):
    """What `cut` is to find, by trying each length."""

    def capped(value, most):
        match value:
            case str() if len(value) > most + 40:
                end = len(value) - most // 2
                return f"{value[: most - most // 2]}[{len(value) - most} characters left out here]{value[end:]}"
            case list():
                return [capped(item, most) for item in value]
            case dict():
                return {key: capped(item, most) for key, item in value.items()}
        return value

    told = [
        escaped(json.dumps(capped(told, most), ensure_ascii=False, separators=(",", ":")))
        for most in range(room, -1, -1)
    ]
    return next((line for line in told if len(line) <= room), None)


@settings(max_examples=100, deadline=None)
@given(LINES, st.integers(200, 400))
def test_a_line_keeps_as_much_of_its_strings_as_fits(content, room):
    told = {"role": "user", "content": content}
    line = Line(json.dumps(told, ensure_ascii=False, separators=(",", ":")))
    found = cut(line, room)
    if len(line) <= room:
        assert str(found) == str(line)
        return
    best = longest(told, room) or longest({"role": "user", "cut": str(line)}, room)
    assert (str(found), len(found)) == (best, len(best))


def test_the_length_of_a_line_is_that_of_what_is_shown():
    for text in ("", "abc", "<a>&\x7f", "é<\x80", "\uff1c<\u2028\ud800", "\U000e0041>", "👍"):
        assert len(Line(text)) == len(str(Line(text))) == len(escaped(text))


@pytest.mark.parametrize(
    "content",
    [
        "<" * 1_000_000,
        "\uff1ca" * 500_000,
        [f"s{n}" for n in range(125_000)],
        [{"a": str(n)} for n in range(80_000)],
        ["y" * 100] * 10_000,
        {f"k{n}": "" for n in range(90_000)},
        list(range(150_000)),
    ],
    ids=["tags", "wide tags", "small strings", "small objects", "strings", "keys", "numbers"],
)
def test_what_a_megabyte_is_made_of_costs_no_time(content):
    # About 1 s for eight of them; of two, twenty times as much is allowed, for machines that are slow.
    began = time.process_time()
    attempts = [conversation(name, [Turn(False, [], {"content": [name, content]}, None, None)]) for name in "ab"]
    prompt = build(attempts, "", {}, random.Random(1), most_chars=90_000)
    assert time.process_time() - began < 5
    assert length(prompt) <= 90_000
    assert prompt.left_out > 900_000
