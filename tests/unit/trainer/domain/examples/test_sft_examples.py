"""From an answer in text to token ids: what is taken of a rendering, and when it is left out."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.domain.examples.sft_examples import (
    CHAT,
    TEXT,
    AnswerText,
    ExampleSelection,
    LeftOut,
    RenderedExample,
    WhyLeftOut,
    rendered,
)

OPEN, END, LINE, ASSISTANT = 1, 2, 3, 4
"""Ids of a template like ChatML: <open> role text <end> <line>."""
ROLES = {"system": 5, "user": 6, "assistant": ASSISTANT, "tool": 7}
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(sorted(ROLES)), "content": TEXTS}), min_size=1, max_size=6
)


def ids_of(text: str) -> list[int]:
    return [10 + ord(letter) for letter in text]


def chatml(messages: Sequence[Any], opened: bool) -> list[int]:
    """One id for each letter; `~` stands for the end token, as `<|im_end|>` in a text does."""
    ids = []
    for message in messages:
        said = [END if letter == "~" else 10 + ord(letter) for letter in message["content"]]
        ids += [OPEN, ROLES[message["role"]], *said, END, LINE]
    return [*ids, OPEN, ASSISTANT] if opened else ids


def forgetful(messages: Sequence[Any], opened: bool) -> list[int]:
    """A template that opens with an empty thought, and drops it once the answer is there."""
    return [*chatml(messages, opened), 8] if opened else chatml(messages, opened)


def told(messages: list[Any], text: str, **values: Any) -> AnswerText:
    answer = {"role": "assistant", "content": text}
    fields = {"endpoint": CHAT, "messages": messages, "tools": None, "template_arguments": None, "answer": answer,
              "whole": True}  # fmt: skip
    return AnswerText(**(fields | values))


HI = [{"role": "user", "content": "hi"}]
PROMPT = tuple(chatml(HI, True))


@given(MESSAGES, TEXTS.filter(lambda text: "~" not in text))
def test_an_answer_is_what_stands_between_the_opened_prompt_and_its_end_token(messages: list[Any], text: str) -> None:
    made = rendered("s", told(messages, text), None, chatml, {END})
    assert made.prompt_ids == tuple(chatml(messages, True))
    assert made.token_ids == (*ids_of(text), END)
    assert made.left_out is None


@given(MESSAGES, TEXTS.filter(lambda text: "~" not in text))
def test_a_logged_prompt_is_kept_whatever_the_rendering_says(messages: list[Any], text: str) -> None:
    """Earlier answers were sampled in other tokens than their text is rendered in."""
    logged = (99, *chatml(messages, True))
    assert rendered("s", told(messages, text), logged, chatml, {END}) == RenderedExample(
        "s", None, (*ids_of(text), END)
    )


@pytest.mark.parametrize("endpoint", ["messages", "responses"])
def test_after_a_logged_prompt_of_another_dialect_only_the_answer_is_rendered(endpoint: str) -> None:
    foreign = told([{"type": "input_text"}], "yes", endpoint=endpoint)
    assert rendered("s", foreign, (99, 98, OPEN, ASSISTANT), chatml, {END}).token_ids == (*ids_of("yes"), END)


@pytest.mark.parametrize(
    ("what", "prompt_ids", "render", "why"),
    [
        (told(HI, "x", endpoint="messages"), None, chatml, WhyLeftOut.NOT_A_CHAT),
        (told(HI, "x", endpoint=TEXT), PROMPT, chatml, WhyLeftOut.NOT_A_CHAT),
        (told(HI, "x", answer=None), PROMPT, chatml, WhyLeftOut.NOT_A_CHAT),
        (told(HI, "x", whole=False), None, chatml, WhyLeftOut.CUT_OFF),
        (told(HI, "x"), None, forgetful, WhyLeftOut.REWRITTEN),
        (told(HI, "x~y"), None, chatml, WhyLeftOut.NO_END),
        (told(HI, "x"), (5, 6), chatml, WhyLeftOut.OPENED_OTHERWISE),
        (told(HI, "x"), (ASSISTANT,), chatml, WhyLeftOut.OPENED_OTHERWISE),
        (told(HI, "x", endpoint="messages"), (5, 6), chatml, WhyLeftOut.OPENED_OTHERWISE),
    ],
)
def test_what_cannot_be_imitated_exactly_is_left_out_with_a_reason(
    what: AnswerText, prompt_ids: tuple[int, ...] | None, render: Any, why: WhyLeftOut
) -> None:
    with pytest.raises(LeftOut, match=f"^{why}$"):
        rendered("s", what, prompt_ids, render, {END})


def test_a_template_without_any_end_token_teaches_no_end_and_is_left_out() -> None:
    with pytest.raises(LeftOut, match=WhyLeftOut.NO_END):
        rendered("s", told(HI, "x"), None, chatml, {77})


def test_fields_that_a_server_adds_to_its_answer_are_not_rendered() -> None:
    seen = []

    def render(messages: Sequence[Any], opened: bool) -> list[int]:
        seen.append(messages)
        return chatml(messages, opened)

    said = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None, "id": "msg-1"}
    rendered("s", told(HI, "", answer=said), None, render, {END})
    assert [*HI, {"role": "assistant", "content": "x"}] in seen


def test_what_was_asked_for_is_read_as_it_is_stored() -> None:
    asked = {"kind": "sft", "from": "teacher", "min_reward": 0.5, "limit": 7}
    assert ExampleSelection.of(asked) == ExampleSelection("teacher", 0.5, 7)
    assert ExampleSelection.of({"from": "best", "limit": 7}) == ExampleSelection("best", None, 7)
