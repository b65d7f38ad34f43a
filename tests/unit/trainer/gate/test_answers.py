"""The parent's answers in the step's rows: first answers, sampled as the probe samples."""

from trainer.domain.constraints import Constraints
from trainer.domain.rows import SampledCompletion, merge
from trainer.gate.answers import Answers, from_rows, tokens_like_the_probes


def row(name: str, prompt: tuple[int, ...], token_ids: tuple[int, ...], **values: object) -> object:
    given = {"version": 3, "temperature": 1.0, "constraints": None} | values
    logprobs = tuple(-float(one) for one in token_ids)
    (merged,) = merge(name, [SampledCompletion(name, prompt, token_ids, logprobs, **given)], 1.0)  # type: ignore[arg-type]
    return merged


def test_first_answers_of_the_version_at_temperature_1_are_cut_off_as_the_probes_are() -> None:
    first = SampledCompletion("a", (1, 2), (5, 6), (-5.0, -6.0), 3, 1.0)
    second = SampledCompletion("b", (1, 2, 5, 6, 9), (7,), (-7.0,), 3, 1.0)
    rows = [
        *merge("two turns", [first, second], 1.0),
        row("long", (4,), (5, 6, 7, 8)),
        row("older", (4,), (5,), version=2),
        row("warm", (4,), (5,), temperature=0.7),
        row("few allowed", (4,), (5,), constraints=Constraints(top_k=5)),
    ]
    parents = from_rows(rows, 3, 3)  # type: ignore[arg-type]
    assert [(one.prompt_ids, one.token_ids) for one in parents.answers] == [((1, 2), (5, 6)), ((4,), (5, 6, 7))]
    assert parents.logprobs == [-5.0, -6.0, -5.0, -6.0, -7.0] and parents.length == 2.5


def test_the_prompts_are_those_with_the_most_answers() -> None:
    answers = Answers()
    for prompt, token_ids in (((1,), (5,)), ((2,), (6, 7)), ((3,), (8,)), ((2,), (9,))):
        answers.add(prompt, token_ids, [-float(one) for one in token_ids])
    assert answers.common_prompts(2) == [(2,), (1,)]
    assert answers.to({(2,)}).logprobs == [-6.0, -7.0, -9.0] and answers.to({(2,)}).length == 1.5


def test_tokens_count_only_where_all_were_sampled_as_the_probes_are() -> None:
    plain, older = row("plain", (1,), (5, 6)), row("older", (1,), (5,), version=2, temperature=0.5)
    bent = row("bent", (1,), (5, 6, 7), constraints=Constraints(top_p=0.9))
    assert tokens_like_the_probes([plain, older, bent], 3) == 2  # type: ignore[list-item]
    assert tokens_like_the_probes([plain, row("warm", (1,), (5,), temperature=0.7)], 3) == 0  # type: ignore[list-item]


def test_answers_that_an_app_cut_off_are_compared_up_to_their_length() -> None:
    end, ended, cut = 99, Answers(), Answers()
    ended.add((1,), (5, end), [-1.0, -1.0])
    cut.add((1,), (5, 6, 7), [-1.0] * 3)
    cut.add((1,), (5, end), [-1.0] * 2)
    assert (ended.longest(16, {end}), cut.longest(16, {end}), cut.longest(3, {end})) == (16, 3, 3)
