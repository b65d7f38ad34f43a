"""Rows without what constraints decided."""

from dataclasses import replace

from trainer.domain.constraints import Constraints
from trainer.domain.measured import SpanMeasure, static_measures, versions_to_measure, without_decided
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row, SampledCompletion, merge

GRAMMAR, PENALTY = Constraints(grammar="tools"), Constraints(presence_penalty=1.0)


def two_turns(
    trajectory_id: str = "t", first: Constraints | None = GRAMMAR, second: Constraints | None = None, gap: float = 1.0
) -> Row:
    """A row of two completions: tokens 2 to 4 and 6 to 7."""
    completions = [
        SampledCompletion(f"{trajectory_id}-0", (1, 2), (3, 4, 5), (-0.1, -0.2, -0.3), 4, 1.0, first),
        SampledCompletion(f"{trajectory_id}-1", (1, 2, 3, 4, 5, 6), (7, 8), (-0.4, -0.5), 5, 1.0, second),
    ]
    (row,) = merge(trajectory_id, completions, gap)
    return row


def test_a_row_knows_which_of_its_tokens_were_constrained_and_how() -> None:
    (first, second) = two_turns(second=PENALTY).constrained
    assert (first.completion_id, first.start, first.end, first.constraints) == ("t-0", 2, 5, GRAMMAR)
    assert (second.completion_id, second.start, second.end, second.constraints) == ("t-1", 6, 8, PENALTY)
    assert two_turns(first=None).constrained == ()


def test_decided_tokens_become_prompt_and_a_grammars_others_get_the_trainers_logprobs() -> None:
    row = two_turns()
    measure = SpanMeasure((False, True, False), (-1.0, -2.0, -3.0), b"S")
    measured = without_decided([row], {(0, 2): measure})
    (left,) = measured.rows
    assert left.sampled_T == (False, False, True, False, True, False, True, True)
    assert left.advantages_T == (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0)
    assert left.inference_logprobs_T[2:5] == (-1.0, -2.0, -3.0) and left.inference_logprobs_T[6:] == (-0.4, -0.5)
    assert left.constrained == (replace(row.constrained[0], measured=True, supports=b"S"),)
    assert (measured.decided, measured.left_out, measured.tokens) == ({"t-0": 1}, frozenset(), 3)


def test_a_trajectory_goes_where_nothing_is_left_or_nothing_is_known() -> None:
    def alone(name: str) -> Row:
        return merge(name, [SampledCompletion(name, (1,), (2, 3), (-0.1, -0.1), 4, 1.0, GRAMMAR)], 1.0)[0]

    rows = [alone("decided"), alone("unknown"), alone("free"), two_turns("partly")]
    measures = {(0, 1): SpanMeasure((True, True)), (2, 1): SpanMeasure((True, False)), (3, 2): SpanMeasure((True,) * 3)}
    measured = without_decided(rows, measures)
    assert [row.trajectory_id for row in measured.rows] == ["free", "partly"]
    assert measured.left_out == {"decided", "unknown"}
    assert measured.decided == {"decided": 2, "free": 1, "partly-0": 3}


def test_all_rows_of_a_trajectory_go_with_one_that_is_unknown() -> None:
    rows = [two_turns("t"), two_turns("t", None)]
    assert without_decided(rows, {}).rows == ()
    assert without_decided(rows, {}).left_out == {"t"}


def test_penalties_are_measured_without_weights_and_only_the_rest_asks_for_versions() -> None:
    rows = [two_turns(first=PENALTY), two_turns(first=Constraints(allowed_token_ids=(3, 4, 5)), second=GRAMMAR)]
    measures = static_measures(rows, {5})
    assert measures == {(0, 2): SpanMeasure((False,) * 3), (1, 2): SpanMeasure((False,) * 3)}
    assert versions_to_measure(rows) == {5}


def test_a_step_has_nothing_to_learn_when_only_zero_advantages_are_left() -> None:
    rows = (two_turns("a", gap=0.0), two_turns("b"))
    taught = StepRows(rows, {"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 0.5}, {}, 4)
    measured = without_decided(rows, {(0, 2): SpanMeasure((False,) * 3)})
    assert measured.left_out == {"b"}
    left = taught.without(measured)
    assert (left.rows, left.advantages) == ((), {})
    assert left.left_out == {"a": "group_uniform", "b": "constrained"}
