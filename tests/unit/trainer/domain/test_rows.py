import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.domain.rows import Answer, Row, SampledCompletion, merge, rows_for_sft
from trainer.errors import RowError


def answered(
    prompt: list[int], tokens: list[int], *, name: str = "c", first: int = 0, version: int = 3
) -> SampledCompletion:
    """A completion whose k-th token has the logprob -(first + k + 1) / 100, so that each can be told apart."""
    logprobs = tuple(-(first + place + 1) / 100 for place in range(len(tokens)))
    return SampledCompletion(name, tuple(prompt), tuple(tokens), logprobs, version, 0.7)


def trained(row: Row) -> list[tuple[int, float]]:
    return [
        (token, logprob)
        for token, sampled, logprob in zip(row.token_ids_T, row.sampled_T, row.inference_logprobs_T, strict=True)
        if sampled
    ]


def test_one_completion_is_one_row_and_nothing_is_not_zero() -> None:
    (row,) = merge("t", [answered([1, 2], [3, 4])], advantage=0.5)
    assert row == Row(
        trajectory_id="t",
        token_ids_T=(1, 2, 3, 4),
        sampled_T=(False, False, True, True),
        inference_logprobs_T=(math.nan, math.nan, -0.01, -0.02),
        versions_T=(-1, -1, 3, 3),
        temperatures_T=(1.0, 1.0, 0.7, 0.7),
        advantages_T=(0.0, 0.0, 0.5, 0.5),
    )


def test_a_prompt_that_repeats_the_conversation_continues_its_row() -> None:
    turns = [
        answered([1], [2]),
        answered([1, 2, 9], [5, 6], first=1, version=4),
        answered([1, 2, 9, 5, 6, 9], [7], first=3),
    ]
    (row,) = merge("t", turns, advantage=1.0)
    assert row.token_ids_T == (1, 2, 9, 5, 6, 9, 7)
    assert trained(row) == [(2, -0.01), (5, -0.02), (6, -0.03), (7, -0.04)]
    assert row.versions_T == (-1, 3, -1, 4, 4, -1, 3)


def test_a_rewritten_prompt_forks_and_repeats_nothing_to_train() -> None:
    turns = [answered([1, 2], [3]), answered([1, 8, 3], [4], first=1)]
    first, second = merge("t", turns, advantage=-1.0)
    assert (trained(first), trained(second)) == ([(3, -0.01)], [(4, -0.02)])
    assert second.token_ids_T == (1, 8, 3, 4)
    assert first.advantages_T == (0.0, 0.0, -1.0) and second.advantages_T == (0.0, 0.0, 0.0, -1.0)


def test_a_retry_of_the_same_prompt_forks() -> None:
    first, second = merge("t", [answered([1], [2]), answered([1], [2], first=1)], advantage=1.0)
    assert (trained(first), trained(second)) == ([(2, -0.01)], [(2, -0.02)])


def test_a_sub_agent_in_between_does_not_break_the_conversation() -> None:
    turns = [answered([1], [2]), answered([50], [51], first=1), answered([1, 2, 3], [4], first=2)]
    rows = merge("t", turns, advantage=1.0)
    assert [row.token_ids_T for row in rows] == [(1, 2, 3, 4), (50, 51)]


def test_the_longest_matching_row_is_continued() -> None:
    turns = [answered([1], [2]), answered([1, 2], [3]), answered([1], [2, 3], first=9), answered([1, 2, 3, 4], [5])]
    longest, other = merge("t", turns, advantage=1.0)
    assert longest.token_ids_T == (1, 2, 3, 4, 5)
    assert other.token_ids_T == (1, 2, 3)


def test_an_answer_cut_off_before_its_first_token_adds_nothing() -> None:
    assert merge("t", [answered([1, 2], [])], advantage=1.0) == []
    (row,) = merge("t", [answered([1, 2], []), answered([1, 2, 3], [4])], advantage=1.0)
    assert row.sampled_T == (False, False, False, True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprobs": (-0.1,)}, "2 token ids but 1 logprobs"),
        ({"logprobs": (-0.1, math.nan)}, "logprob nan of sampled token 1"),
        ({"logprobs": (-math.inf, -0.1)}, "logprob -inf of sampled token 0"),
        ({"logprobs": (-0.1, 0.01)}, "logprob 0.01"),
        ({"token_ids": (3, -4)}, "negative"),
        ({"prompt_ids": (-1,)}, "negative"),
        ({"prompt_ids": ()}, "the prompt has no ids"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"version": -1}, "version -1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_name(change: dict[str, object], says: str) -> None:
    broken = replace(answered([1], [3, 4], name="chat-7"), **change)  # type: ignore[arg-type]
    with pytest.raises(RowError, match="completion chat-7: ") as refused:
        merge("t", [broken], advantage=1.0)
    assert says in str(refused.value)


def test_float_noise_above_zero_is_no_error() -> None:
    noisy = replace(answered([1], [3]), logprobs=(1e-6,))
    assert trained(merge("t", [noisy], advantage=1.0)[0]) == [(3, 1e-6)]


def test_an_advantage_that_is_no_number_is_refused() -> None:
    with pytest.raises(RowError, match="trajectory t: advantage nan"):
        merge("t", [answered([1], [2])], advantage=math.nan)


ids: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def conversations(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[SampledCompletion]:
    """Turns that each extend an earlier turn, cut into it, or begin anew; four tokens, so that prefixes collide."""
    turns: list[SampledCompletion] = []
    said = 0
    for _ in range(draw(st.integers(1, 8))):
        history: list[int] = []
        if turns and draw(st.booleans()):
            turn = draw(st.sampled_from(turns))
            history = [*turn.prompt_ids, *turn.token_ids]
            history = history[: draw(st.sampled_from([len(history), len(history), len(history) // 2]))]
        prompt = history + draw(ids) or [0]
        tokens = draw(ids)
        turns.append(answered(prompt, tokens, name=str(len(turns)), first=said))
        said += len(tokens)
    return turns


@given(conversations())
def test_every_sampled_token_is_trained_exactly_once(turns: list[SampledCompletion]) -> None:
    said = [pair for turn in turns for pair in zip(turn.token_ids, turn.logprobs, strict=True)]
    rows = merge("t", turns, advantage=1.0)
    assert sorted(pair for row in rows for pair in trained(row)) == sorted(said)


@given(conversations())
def test_every_sampled_token_stands_behind_the_very_prompt_it_was_sampled_after(turns: list[SampledCompletion]) -> None:
    rows = merge("t", turns, advantage=1.0)
    for turn in turns:
        for place, logprob in enumerate(turn.logprobs):
            (before,) = [
                row.token_ids_T[: row.inference_logprobs_T.index(logprob)]
                for row in rows
                if logprob in row.inference_logprobs_T
            ]
            assert before == turn.prompt_ids + turn.token_ids[:place]


@given(conversations())
def test_rows_keep_the_order_in_which_things_were_said(turns: list[SampledCompletion]) -> None:
    for row in merge("t", turns, advantage=1.0):
        logprobs = [logprob for _, logprob in trained(row)]
        assert logprobs == sorted(logprobs, reverse=True)


@given(conversations())
def test_what_was_not_sampled_is_marked_so_in_every_field(turns: list[SampledCompletion]) -> None:
    for row in merge("t", turns, advantage=1.0):
        for sampled, logprob, version, temperature, advantage in zip(
            row.sampled_T, row.inference_logprobs_T, row.versions_T, row.temperatures_T, row.advantages_T, strict=True
        ):
            assert sampled == (not math.isnan(logprob)) == (version != -1) == (temperature == 0.7) == (advantage == 1.0)
            assert sampled or advantage == 0.0


def test_each_completion_has_an_advantage_of_its_own_in_a_shared_row_and_in_a_fork() -> None:
    turns = [
        answered([1], [2, 3]),
        answered([1], [], name="cut off"),
        answered([1, 2, 3, 9], [5]),
        answered([1, 8], [4]),
    ]
    shared, forked = merge("t", turns, advantage=[0.5, 9.0, -0.25, 0.0])
    assert shared.advantages_T == (0.0, 0.5, 0.5, 0.0, -0.25)
    assert forked.advantages_T == (0.0, 0.0, 0.0)
    with pytest.raises(RowError, match="trajectory t: advantage inf"):
        merge("t", turns[:2], advantage=[0.5, math.inf])


@given(st.lists(st.tuples(ids, st.lists(st.integers(0, 3), min_size=1, max_size=4)), min_size=1, max_size=8))
def test_a_conversation_that_only_grows_is_one_row(turns: list[tuple[list[int], list[int]]]) -> None:
    completions: list[SampledCompletion] = []
    history = [0]
    for new_prompt, tokens in turns:
        completions.append(answered([*history, *new_prompt], tokens))
        history += [*new_prompt, *tokens]
    (row,) = merge("t", completions, advantage=1.0)
    assert row.token_ids_T == tuple(history)


def test_an_answer_to_imitate_has_no_logprobs_and_no_version() -> None:
    (row,) = rows_for_sft("t", [Answer("f", (1, 2), (3, 4))])
    assert row == Row(
        trajectory_id="t",
        token_ids_T=(1, 2, 3, 4),
        sampled_T=(False, False, True, True),
        inference_logprobs_T=(math.nan,) * 4,
        versions_T=(-1,) * 4,
        temperatures_T=(1.0,) * 4,
        advantages_T=(0.0, 0.0, 1.0, 1.0),
    )


@given(conversations())
def test_answers_to_imitate_share_rows_as_sampled_ones_do(completions: list[SampledCompletion]) -> None:
    rows = rows_for_sft("t", [Answer(one.completion_id, one.prompt_ids, one.token_ids) for one in completions])
    merged = merge("t", completions, 1.0)
    assert [(row.token_ids_T, row.sampled_T) for row in rows] == [(row.token_ids_T, row.sampled_T) for row in merged]


@pytest.mark.parametrize("answer", [Answer("f", (), (3,)), Answer("f", (1, -1), (3,)), Answer("f", (1,), (3, -2))])
def test_an_answer_that_nothing_predicts_or_that_is_no_ids_is_refused(answer: Answer) -> None:
    with pytest.raises(RowError, match="answer f:"):
        rows_for_sft("t", [answer])


def test_tokens_of_tools_are_marked_between_two_answers_of_a_row() -> None:
    """Ids 20 and above are a tool's, 10 and above a user's."""
    turns = [
        replace(answered([1, 20], [2]), tool_tokens=1),  # nothing was sampled before it in its row
        replace(answered([1, 20, 2, 21, 22], [3]), tool_tokens=2),
        answered([1, 20, 2, 21, 22, 3, 10], [4]),
        replace(answered([1, 20, 2, 21, 22, 3, 10, 4, 23], [5]), tool_tokens=1),
    ]
    (row,) = merge("t", turns, advantage=1.0)
    assert row.tool_spans == ((3, 5), (8, 9))
    assert [row.token_ids_T[start:end] for start, end in row.tool_spans] == [(21, 22), (23,)]


def test_an_answer_between_that_is_not_trained_is_none_of_a_tools_tokens() -> None:
    """Between the two answers are a question, another policy's answer (8) and what its tool gave."""
    turns = [answered([1], [2]), replace(answered([1, 2, 10, 8, 20, 21], [3]), tool_tokens=2)]
    (row,) = merge("t", turns, advantage=1.0)
    assert row.tool_spans == ((4, 6),)


def test_what_a_fork_repeats_of_a_tool_is_marked_once() -> None:
    retried = [replace(answered([1, 2, 20], [3]), tool_tokens=1), replace(answered([1, 2, 20], [4]), tool_tokens=1)]
    first, second = merge("t", [answered([1], [2]), *retried], advantage=1.0)
    assert (first.tool_spans, second.tool_spans) == (((2, 3),), ())
