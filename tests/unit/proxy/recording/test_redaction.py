"""What is private leaves no trace in what is written; what is not, stays byte for byte."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from proxy.domain.address import Address
from proxy.domain.call import Call
from proxy.recording.redaction import FAILED, TIMED_OUT, Redactor
from proxy.recording.redaction_presets import is_card
from tests.unit.proxy.conftest import ANSWER_IDS, LOGPROBS, PROMPT_IDS, make_call, make_choice, raw
from whetstone.config.privacy import PrivacySettings, pseudonym

PRESETS = ("email", "phone", "card", "key")
MAIL, PHONE, CARD = "alice.o+x@mail.example.com", "+49 171 1234567", "4111 1111 1111 1111"
KEYS = (
    "sk-proj-abcDEF0123456789abcdef",
    "ghp_abcdefghijklmnopqrstuvwxyz0123",
    "AKIAIOSFODNN7EXAMPLE",
    "wsk_k3yid_c0ffee-_c0ffee",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_9",
)
PRIVATE = (MAIL, PHONE, CARD, *KEYS)
private = st.sampled_from(PRIVATE)
words = st.text("ab c.,;:!?()<>=\n\t\"'{}[]\\ü", max_size=12)


def redactor(**values: Any) -> Redactor:
    return Redactor(PrivacySettings(**({"redact": PRESETS} | values)))


def redacted(call: Call, **values: Any) -> Call:
    return redactor(**values).calls([call])[0]


def call_with(text: str, **values: Any) -> Call:
    """A call in which an app said this."""
    return make_call(messages=[{"role": "user", "content": text}], **values)


def content(call: Call) -> Any:
    return msgspec.json.decode(call.messages[0])["content"]


def left(text: str, **values: Any) -> str:
    """What is written of a text."""
    return str(content(redacted(call_with(text), **values)))


# What is found.


@pytest.mark.parametrize(
    ("text", "left_of_it"),
    [
        ("write to bob@example.com.", "write to [email]."),
        ("<Bob.Jones+x@mail.example.co.uk>", "<[email]>"),
        ("?to=bob%40example.com&x=1", "?to=[email]&x=1"),
        ("müller@bücher.example", "[email]"),
        ("call +1 (555) 123-4567!", "call [phone]!"),
        ("call (555) 123-4567 or 030 1234567", "call [phone] or [phone]"),
        ("0171/1234567", "[phone]"),
        ("4111111111111111, 3782 822463 10005", "[card], [card]"),
        ("2345 4111-1111-1111-1111", "2345 [card]"),
        ("key=sk-abcdefghij0123456789", "key=[key]"),
        ("Authorization: Bearer abc0123456789DEF.x", "Authorization: Bearer [key]"),
        ("-----BEGIN PRIVATE KEY-----\nMII", "[key]"),
        *((key, "[key]") for key in KEYS),
    ],
)
def test_what_looks_private_is_taken_out(text: str, left_of_it: str) -> None:
    assert left(text) == left_of_it


@pytest.mark.parametrize(
    "text",
    [
        "lodash@4.17.21 and policy@v3",
        "at 2026-01-02 03:04:05, 1767268800000 ms, 10.0.0.127:8000",
        "4111 1111 1111 1112",  # its check digit is another
        "0.1234567 -1234567 12345678901234",
        "task-management-application of a bearer of good news",
        "sk-learn-and-other-libraries",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert left(text) == text


@given(st.from_regex(r"[3-6][0-9]{14}", fullmatch=True))
def test_of_ten_last_digits_one_makes_a_card(digits: str) -> None:
    last = [digit for digit in "0123456789" if is_card(digits + digit)]
    assert len(last) == 1
    assert left(f"{digits}{last[0]}") == "[card]"


# Where it is found.


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Calls with something private, or nothing, in every place that holds text."""
    text = st.builds("{} {} {}".format, words, private | st.just("nothing"), words)
    values = st.recursive(
        text | st.integers(0, 999),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    )
    arguments = values.map(json.dumps) | text
    function = {"name": "f", "arguments": draw(arguments)}
    tool_call = {"id": "c", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": draw(text)},
        {"role": "user", "content": [{"type": "text", "text": draw(text)}]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "c", "content": draw(arguments)},
    ]
    answer_text = draw(text)
    choice = make_choice(message={"role": "assistant", "content": answer_text, "reasoning": draw(text)})
    address = Address(trajectory_id="t0", metadata={"x": draw(values)}, task=draw(text))
    sampling = {"stop": [draw(text)], "user": draw(text), "metadata": {"y": draw(text)}, "guided_json": draw(values)}
    return make_call(
        messages=messages,
        tools=[{"type": "function", "function": {"name": "f", "description": draw(text)}}],
        choices=(choice,),
        address=address,
        sampling=raw(sampling),
        end_user=draw(text),
        error=draw(text),
        reply=answer_text.encode(),
    )


@given(calls())
@examples(max_examples=150, deadline=None)
def test_nothing_private_survives_anywhere_in_a_call(call: Call) -> None:
    clean = redacted(call)
    written = msgspec.json.encode(clean).decode()
    # However often it stands in quotes within quotes.
    everything = written.replace("\\", "")
    for one in PRIVATE:
        assert one.replace("\n", "n") not in everything
    assert clean.redactions is not None
    assert redacted(call) == clean, "the same text always becomes the same"


@given(calls())
@examples(max_examples=100, deadline=None)
def test_a_call_without_anything_private_is_written_as_it_is(call: Call) -> None:
    has_private = any(one.replace("\n", "n") in msgspec.json.encode(call).decode().replace("\\", "") for one in PRIVATE)
    clean = redacted(call)
    assert bool(clean.redactions) == has_private
    if not has_private:
        assert clean == msgspec.structs.replace(call, redactions=0)


def test_arguments_of_a_tool_stay_json() -> None:
    arguments = json.dumps({"text": f"hi\n{MAIL}", "n": 4111111111111111, MAIL: 1})
    call = call_with("hi", choices=(make_choice(message={"tool_calls": [{"function": {"arguments": arguments}}]}),))
    made = redacted(call).choices[0].message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(made) == {"text": "hi\n[email]", "n": "[card]", "[email]": 1}


def test_only_long_whole_numbers_are_read_like_texts() -> None:
    call = make_call(messages=[{"prompt": [411111, 1, 2], "number": 4111111111111111}])
    clean = redacted(call, redact_patterns={"digits": r"\d+"})
    assert msgspec.json.decode(clean.messages[0]) == {"prompt": [411111, 1, 2], "number": "[card]"}


# What becomes of the ids.


def test_ids_that_spell_what_was_taken_out_go_with_it_and_are_counted_still() -> None:
    clean = redacted(call_with(f"I am {MAIL}"))
    (choice,) = clean.choices
    assert (clean.prompt_token_ids, choice.token_ids, choice.logprobs) == (None, None, None)
    assert (clean.prompt_tokens, choice.tokens) == (len(PROMPT_IDS), len(ANSWER_IDS))
    assert clean.why_not_trained(choice) == "redacted"
    assert clean.redactions == 1


@pytest.mark.parametrize("values", [{"bent": "greedy"}, {"bent": "demonstration"}])
def test_it_is_said_before_anything_else_that_a_supervised_step_would_take(values: dict[str, Any]) -> None:
    clean = redacted(call_with(MAIL, **values))
    assert clean.why_not_trained(clean.choices[0]) == "redacted"


def test_kept_by_choice_they_stay_and_train() -> None:
    clean = redacted(call_with(MAIL), keep_redacted_ids=True)
    (choice,) = clean.choices
    assert content(clean) == "[email]"
    assert (clean.prompt_token_ids, choice.token_ids, choice.logprobs) == (PROMPT_IDS, ANSWER_IDS, LOGPROBS)
    assert clean.why_not_trained(choice) is None


def test_what_never_had_ids_has_none_to_keep() -> None:
    call = call_with(
        MAIL, prompt_token_ids=None, bent="demonstration", choices=(make_choice(token_ids=None, logprobs=None),)
    )
    clean = redacted(call, keep_redacted_ids=True)
    assert clean.why_not_trained(clean.choices[0]) == "redacted"


def test_who_it_was_for_has_another_name_and_no_id_tells_it() -> None:
    call = make_call(
        end_user=MAIL, sampling=raw({"user": MAIL}), address=Address(trajectory_id="t0", metadata={"by": MAIL})
    )
    clean = redacted(call)
    assert clean.end_user == pseudonym(MAIL)
    assert msgspec.json.decode(clean.sampling) == {"user": pseudonym(MAIL)}
    assert clean.address.metadata == {"by": "[email]"}
    assert clean.why_not_trained(clean.choices[0]) is None
    assert clean.redactions


def test_an_answer_that_was_redacted_is_not_kept_to_be_sent_again() -> None:
    assert redacted(call_with("hi", reply=b"Hello")).reply == b"Hello"
    assert redacted(call_with(MAIL, reply=b"Hello")).reply is None


# What the settings bring.


def test_own_patterns_and_functions_come_after_the_presets() -> None:
    values = {
        "redact_patterns": {"badge": r"B-\d{6}"},
        "redact_functions": ("tests.unit.proxy.recording.test_redaction:no_bob",),
    }
    assert left(f"Bob, B-123456, {MAIL}", **values) == "somebody, [badge], [email]"


def no_bob(text: str) -> str:
    return text.replace("Bob", "somebody")


def fails(text: str) -> str:
    raise RuntimeError(text)


def returns_nothing(text: str) -> None:
    return None


@pytest.mark.parametrize("name", ["fails", "returns_nothing"])
def test_a_function_that_fails_costs_the_text(name: str) -> None:
    own = redactor(redact_functions=(f"tests.unit.proxy.recording.test_redaction:{name}",))
    (clean,) = own.calls([call_with("secret")])
    assert content(clean) == FAILED
    assert own.failed > 0
    assert clean.prompt_token_ids is None


@pytest.mark.parametrize(
    "name",
    [
        "tests.nowhere:f",
        "tests.unit.proxy.recording.test_redaction:nobody",
        "tests.unit.proxy.recording.test_redaction:MAIL",
    ],
)
def test_a_function_that_is_none_stops_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition(":")[0]):
        redactor(redact_functions=(name,))


def test_a_pattern_that_runs_away_costs_the_text_and_bounded_time() -> None:
    own = redactor(redact=(), redact_patterns={"evil": r"(a|aa)+$"})
    (clean,) = own.calls([call_with("a" * 5000 + "b", error="a" * 5000 + "b")])
    assert content(clean) == clean.error == TIMED_OUT
    # Left alone it would take longer than the sun shines; what comes after it has no time left.
    assert own.timed_out >= 2
    assert msgspec.json.decode(clean.messages[0])["role"] == "user"


@pytest.mark.parametrize(
    "piece",
    ["4111 ", "0123 ", "a@", "a@b.1.", "sk-", "eyJ-", "eyJ.", "+1", "+1 () ", "-----BEGIN PRIVATE KEY-----", "bearer "],
)
def test_no_text_keeps_a_preset_busy_for_long(piece: str) -> None:
    own = redactor()
    own.calls([call_with((piece * 200_000)[:200_000])])
    assert own.timed_out == 0


def test_a_long_call_is_redacted_in_a_thread_and_a_short_one_at_once() -> None:
    own = redactor()

    async def both() -> list[Call]:
        short, long = call_with(MAIL), call_with("x " * 50_000 + MAIL)
        return [*await own.calls_off_loop([short]), *await own.calls_off_loop([long])]

    assert [clean.redactions for clean in asyncio.run(both())] == [1, 1]


def test_feedback_is_redacted_but_for_what_it_is_about() -> None:
    row = {
        "target_id": "t@example.com", "comment": f"ask {MAIL}", "metadata": {"by": MAIL}, "judge": None,
        "demonstration": {"role": "assistant", "content": f"write to {MAIL}"},
    }  # fmt: skip
    assert asyncio.run(redactor().feedback([row])) == [
        {
            "target_id": "t@example.com", "comment": "ask [email]", "metadata": {"by": "[email]"}, "judge": None,
            "demonstration": {"role": "assistant", "content": "write to [email]"},
        }
    ]  # fmt: skip
