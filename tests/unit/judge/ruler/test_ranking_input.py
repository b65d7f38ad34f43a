"""What there is to rank, and what it is called: the same question has the same name, another one another."""

import random

import pytest

from judge.decisions.model import Turn
from judge.ruler.conversation import conversation
from judge.ruler.parse import AttemptScore
from judge.ruler.ranking_input import DRIFT, REWARD, PlannedJudgement, material, sections, slots
from whetstone.config.rewards import JudgeSettings, RulerSettings

RULER = RulerSettings()
JUDGE = JudgeSettings(model="openai/m", url="http://judge/v1")
SLOT = PlannedJudgement(place=0, section=0, purpose=REWARD, judge="a")
SAID = {"a": "one", "b": "two", "c": "three"}


def about(said=None, group="g", rubric="Be brief.", ruler=RULER):
    """A group. `said`: by trajectory, the last words."""
    turns = {name: [Turn(False, [], {"role": "assistant", "content": text}, None, None)]
             for name, text in (SAID if said is None else said).items()}  # fmt: skip
    return material(group, [conversation(name, of) for name, of in turns.items()], rubric, ruler)


def scored(*scores):
    return [AttemptScore(score, f"because {score}", None) for score in scores]


def test_attempts_that_are_alike_are_one():
    group = about({"a": "one", "b": "two", "twin": "one", "third": "one"})
    assert len(group.attempts) == 2
    assert sorted(group.trajectories) == [("a", "third", "twin"), ("b",)]
    assert group.sections == ((0, 1),)


def test_the_order_of_the_attempts_is_not_that_of_the_trajectories():
    renamed = about(dict(zip("cab", SAID.values(), strict=True)))
    assert [one.digest for one in about().attempts] == [one.digest for one in renamed.attempts]


def test_a_large_group_has_its_sections():
    group = about({f"t{place}": f"say {place}" for place in range(6)}, ruler=RulerSettings(attempts_per_call=4))
    assert group.sections == ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 0, 1))


def test_parts_without_weight_are_not_asked_for():
    assert about(ruler=RulerSettings(parts={"right": 2, "brief": 0})).parts == {"right": 2}


def test_an_answer_may_be_used_again_for_whatever_group_and_trajectories():
    elsewhere = about({"x": "three", "y": "one", "z": "two"}, group="h")
    assert elsewhere.cache_key(0, 0, JUDGE) == about().cache_key(0, 0, JUDGE)
    assert elsewhere.attempts_hash == about().attempts_hash
    assert elsewhere.judgement_id(SLOT, JUDGE) != about().judgement_id(SLOT, JUDGE)


@pytest.mark.parametrize(
    "other",
    [
        about(rubric="Be long."),
        about(ruler=RulerSettings(parts={"right": 1})),
        about(SAID | {"c": "four"}),
        about({"a": "one", "b": "two"}),
    ],
    ids=["rubric", "parts", "attempts", "fewer"],
)
def test_another_question_has_another_name(other):
    assert other.cache_key(0, 0, JUDGE) != about().cache_key(0, 0, JUDGE)
    assert other.attempts_hash != about().attempts_hash
    assert other.judgement_id(SLOT, JUDGE) != about().judgement_id(SLOT, JUDGE)


@pytest.mark.parametrize("changed", [{"model": "openai/n"}, {"url": "http://other/v1"}, {"temperature": 1.0}])
def test_an_answer_of_another_model_is_another_one(changed):
    other = JUDGE.model_copy(update=changed)
    assert about().cache_key(0, 0, other) != about().cache_key(0, 0, JUDGE)
    assert about().judgement_id(SLOT, other) != about().judgement_id(SLOT, JUDGE)


def test_sections_that_are_cut_otherwise_are_other_judgements():
    said = {f"t{place}": f"say {place}" for place in range(6)}
    few, many = (about(said, ruler=RulerSettings(attempts_per_call=most)) for most in (4, 8))
    assert few.attempts_hash == many.attempts_hash
    assert few.judgement_id(SLOT, JUDGE) != many.judgement_id(SLOT, JUDGE)


@pytest.mark.parametrize("changed", [{"timeout_s": 9.0}, {"api_key_env": "KEY"}, {"concurrency": 1}])
def test_how_a_model_is_reached_does_not_matter(changed):
    other = JUDGE.model_copy(update=changed)
    assert about().cache_key(0, 0, other) == about().cache_key(0, 0, JUDGE)
    assert about().judgement_id(SLOT, other) == about().judgement_id(SLOT, JUDGE)


def test_weights_of_the_same_parts_are_another_question():
    two = (about(ruler=RulerSettings(parts={"right": weight, "brief": 1})) for weight in (1, 2))
    assert len({one.rubric_hash for one in two}) == 2


def test_no_two_judgements_of_a_group_have_one_name():
    slots = [
        SLOT,
        PlannedJudgement(1, 0, REWARD, "a"),
        PlannedJudgement(0, 1, REWARD, "a"),
        PlannedJudgement(0, 0, DRIFT, "a"),
        PlannedJudgement(0, 0, REWARD, "b"),
    ]
    group = about(ruler=RulerSettings(attempts_per_call=2))
    assert len({group.judgement_id(slot, JUDGE) for slot in slots}) == 5
    keys = {group.cache_key(section, place, JUDGE) for section in range(3) for place in range(2)}
    assert len(keys) == 6


def test_what_is_stored_is_read_again_and_used_again():
    group = about({"a": "one", "b": "two", "c": "three", "twin": "one"})
    scores = group.stored(0, scored(0.1, 0.5, 0.9), order=(2, 0, 1))
    assert group.read(0, scores) == {0: 0.1, 1: 0.5, 2: 0.9}
    assert scores.keys() == {"a", "b", "c", "twin"}
    assert scores["a"] == scores["twin"]
    first = scores[group.trajectories[0][0]]
    assert (first["explanation"], first["parts"], first["position"]) == ("because 0.1", None, 1)
    elsewhere = about({"x": "three", "y": "one", "z": "two", "w": "two"}, group="h")
    again = elsewhere.again(0, scores)
    assert again["y"] == scores["a"]
    assert again["z"] == again["w"] == scores["b"]
    assert again["x"] == scores["c"]
    assert elsewhere.read(0, again) == {0: 0.1, 1: 0.5, 2: 0.9}


def test_what_is_stored_is_read_for_a_twin_that_came_later_whatever_it_is_called():
    scores = about().stored(0, scored(0.1, 0.5, 0.9), order=(2, 0, 1))
    joined = about(SAID | {"0": "one"})
    assert joined.judgement_id(SLOT, JUDGE) == about().judgement_id(SLOT, JUDGE)
    assert joined.read(0, scores) == {0: 0.1, 1: 0.5, 2: 0.9}


def test_each_section_is_stored_with_its_own_attempts():
    said = {f"t{place}": f"say {place}" for place in range(6)}
    group = about(said, ruler=RulerSettings(attempts_per_call=4))
    rng = random.Random(0)
    for section, part in enumerate(group.sections):
        given = [rng.random() for _ in part]
        order = rng.sample(range(4), 4)
        scores = group.stored(section, scored(*given), order)
        assert group.read(section, scores) == dict(zip(part, given, strict=True))
        assert scores.keys() == {group.trajectories[one][0] for one in part}
        assert sorted(said["position"] for said in scores.values()) == [0, 1, 2, 3]


@pytest.mark.parametrize("attempts", [1, 2, 7, 8])
def test_attempts_that_fit_are_read_together(attempts):
    assert sections(attempts, 8) == [tuple(range(attempts))]


def test_more_attempts_are_read_in_parts_that_overlap_by_half():
    assert sections(6, 4) == [(0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 0, 1)]


@pytest.mark.parametrize("most", [2, 3, 5, 8, 9])
def test_parts_hold_every_attempt_twice_and_hang_together(most):
    for attempts in range(most + 1, 5 * most + 3):
        parts = sections(attempts, most)
        assert all(len(part) == len(set(part)) == most for part in parts)
        assert all(sum(one in part for part in parts) >= 2 for one in range(attempts))
        reached, left = set(parts[0]), list(parts[1:])
        while joined := [part for part in left if reached & set(part)]:
            reached |= {one for part in joined for one in part}
            left = [part for part in left if part not in joined]
        assert reached == set(range(attempts))


def test_the_judgements_go_round_among_the_judges():
    needed = slots(2, RulerSettings(judges=("a", "b"), judgements=3), ("a", "b"), "g")
    assert needed == [
        PlannedJudgement(place, section, REWARD, judge)
        for place, judge in enumerate(("a", "b", "a"))
        for section in (0, 1)
    ]


def test_the_strong_judge_comes_last_and_rewards_nothing():
    ruler = RulerSettings(judges=("a",), judgements=2, strong="s", strong_share=1)
    assert slots(2, ruler, ("a",), "g")[4:] == [PlannedJudgement(2, 0, DRIFT, "s"), PlannedJudgement(2, 1, DRIFT, "s")]
    assert len(slots(2, ruler.model_copy(update={"strong_share": 0}), ("a",), "g")) == 4
