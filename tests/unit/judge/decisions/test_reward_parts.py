"""Arithmetic of rewards in code, by hand."""

from datetime import UTC, datetime

import pytest

from judge.decisions.model import Trajectory
from judge.decisions.reward_parts import NotNumbers, combined, parts_of, worth
from whetstone.config.rewards import RewardFunction, RewardSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GIVEN = (0.5, "trajectory")


def learning(*functions, **values):
    return RewardSettings(
        rewards=tuple(
            RewardFunction(name=name, run="m:f", kind=kind, weight=weight) for name, kind, weight in functions
        ),
        **values,
    )


R, P, V = ("r", "reward", 2.0), ("p", "penalty", -1.0), ("v", "veto", 1.0)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("1", {"f": 1.0}),
        ("true", {"f": 1.0}),
        ("-0.5\n", {"f": -0.5}),
        ('{"a": 1, "b.c": false}', {"f.a": 1, "f.b.c": 0}),
        ("{}", {}),
    ],
)
def test_an_answer_is_a_number_or_named_numbers(answer, parts):
    assert parts_of("f", answer) == parts


@pytest.mark.parametrize(
    "answer",
    ["", "one", '"1"', "null", "[1]", "NaN", "Infinity", "-Infinity", "1e400", "1e10", "9" * 5000, '{"a": "b"}',
     '{"a": NaN}', '{"": 1}', "1 2", "[" * 100_000, '{"a": {"b": 1}}', f'{{"{"x" * 65}": 1}}',
     "{" + ",".join(f'"{n}": 1' for n in range(65)) + "}"],
)  # fmt: skip
def test_anything_else_is_refused_in_a_short_sentence(answer):
    with pytest.raises(NotNumbers) as error:
        parts_of("f", answer)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("given", "parts", "reward"),
    [
        (None, {}, None),
        (None, {"r": 3.0}, (6.0, "code")),
        (None, {"r": 0.0}, (0.0, "code")),
        (None, {"r.a": 1.0, "r.b": 2.0}, (6.0, "code")),
        (None, {"p": 3.0}, None),
        (None, {"r": 3.0, "p": 1.0}, (5.0, "code")),
        (None, {"rr": 3.0}, None),
        (GIVEN, {}, GIVEN),
        (GIVEN, {"r": 3.0}, (6.5, "trajectory")),
        (GIVEN, {"p": 3.0}, (-2.5, "trajectory")),
        (GIVEN, {"r": 3.0, "p": 1.0, "v": 0.0}, (5.5, "trajectory")),
        (GIVEN, {"r": 3.0, "p": 1.0, "v": 0.1}, (-1.0, "code")),
        (None, {"v": 1.0}, (-1.0, "code")),
        (GIVEN, {"v.a": 1.0, "v.b": -1.0}, (-1.0, "code")),
    ],
)
def test_a_reward_is_feedback_and_functions_together(given, parts, reward):
    assert combined(given, parts, learning(R, P, V, failure_reward=-1.0)) == reward


def test_a_veto_without_a_failure_reward_gives_nothing():
    assert combined(GIVEN, {"v": 1.0}, learning(V)) == (0.0, "code")


def test_without_feedback_every_reward_function_must_have_said_something():
    two = learning(R, ("s", "reward", 1.0))
    assert combined(None, {"r": 1.0}, two) is None
    assert combined(None, {"r": 1.0, "s": 1.0}, two) == (3.0, "code")
    assert combined(GIVEN, {"r": 1.0}, two) == (2.5, "trajectory")


def test_what_weights_blow_up_beyond_numbers_is_no_reward():
    assert combined(GIVEN, {"r": 1e9}, learning(("r", "reward", 1e308))) is None


def test_while_functions_are_due_there_is_no_reward():
    due = Trajectory("t", None, "train", False, "ended", None, None, 1, None, None, NOW, NOW, NOW, code_due_at=NOW)
    assert worth(due, GIVEN, learning(R)).reward is None
