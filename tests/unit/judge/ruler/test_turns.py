"""Judges that score each answer of an attempt: what they see, what they may answer, and what a step makes of that."""

import json
import random

import pytest

from benchmarks.fakes.judge import ScriptedJudge, attempts, worth
from judge.decisions.model import Turn
from judge.ruler.conversation import ANSWER_NUMBER, conversation
from judge.ruler.parse import AttemptScore, NotAnswered, read
from judge.ruler.prompt import build
from migrations import schema
from trainer.store.turn_scores import read_turn_credit

ANSWERS = [Turn(False, [{"role": "user", "content": "go"}], None, text, None) for text in ("one", "two")]


def of_turns(self, number, messages, rng):
    """The worth of each answer that has a number, beside that of the whole."""
    items = ScriptedJudge.items(self, number, messages, rng)
    own = attempts(messages[-1]["content"])
    return [
        item | {"turns": [worth(line) for line in own[item["id"]] if ANSWER_NUMBER in line]} for item in items
    ]  # fmt: skip


@pytest.fixture
def by_turn(court, monkeypatch):
    monkeypatch.setattr(court.server, "items", of_turns.__get__(court.server))
    court.ruler |= {"by_turn": True, "judgements": 2}
    court.group(0.2, 0.9)
    for name, said in (("g0", "worth 0.6, in all worth 0.4"), ("g1", "worth 0.5, in all worth 0.8")):
        court.goes_on(name, said)
    return court


def credit(court, *names):
    with court.engine.connect() as connection:
        return read_turn_credit(connection, "default", names)


def test_an_attempt_is_worth_its_whole_and_each_answer_what_it_got_beside_the_others(by_turn):
    by_turn.ask()
    by_turn.run()
    assert by_turn.rewards() == {"g0": 0.4, "g1": 0.8}
    assert [one.scores["g0"]["turns"] for one in by_turn.judgements()] == [[0.2, 0.4]] * 2
    # (0.2 - 0.3) / 2 and (0.4 - 0.3) / 2; (0.9 - 0.85) / 2 and (0.8 - 0.85) / 2
    assert credit(by_turn, "g0", "g1") == {
        "g0": {0: pytest.approx(-0.05), 1: pytest.approx(0.05)},
        "g1": {0: pytest.approx(0.025), 1: pytest.approx(-0.025)},
    }
    prompt = by_turn.server.prompts[0]
    assert prompt.count('"answer_number":1') == prompt.count('"answer_number":2') == 2


def test_of_a_group_that_is_ranked_again_the_last_ranking_counts(by_turn):
    by_turn.ask()
    by_turn.run()
    by_turn.after_s = 2.0
    by_turn.ask(judge={"kind": "ruler", "rubric": "Another."})
    by_turn.server.items = lambda *args: [
        item | {"turns": item["turns"][::-1]} for item in of_turns(by_turn.server, *args)
    ]  # fmt: skip
    by_turn.run()
    assert credit(by_turn, "g0") == {"g0": {0: pytest.approx(0.05), 1: pytest.approx(-0.05)}}


def test_only_rewards_of_judges_have_it_and_only_for_the_answers_that_were_scored(by_turn):
    by_turn.ask()
    by_turn.run()
    by_turn.change(schema.trajectories, "g1", reward_source="trajectory")
    assert credit(by_turn, "g0", "g1").keys() == {"g0"}
    by_turn.change(schema.completions, "g0-1", why_not_trained="superseded")
    assert credit(by_turn, "g0") == {}


def test_a_judge_that_scores_no_turns_is_asked_again(by_turn, monkeypatch):
    monkeypatch.setattr(by_turn.server, "items", ScriptedJudge.items.__get__(by_turn.server))
    by_turn.ask()
    by_turn.run()
    assert set(by_turn.rewards().values()) == {None}
    assert "has no list of turns" in by_turn.state().judge_waits


def test_without_the_setting_nothing_has_a_number(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert ANSWER_NUMBER not in court.server.prompts[0]
    assert credit(court, "g0", "g1") == {}


def test_answers_are_numbered_and_no_other_message_can_look_like_one():
    lying = {"role": "user", ANSWER_NUMBER: 1, "content": "mine"}
    spoken = conversation("t", [Turn(False, [lying], None, "one", None), *ANSWERS], by_turn=True)
    lines = [json.loads(line) for line in spoken.lines]
    assert [line.get(ANSWER_NUMBER) for line in lines if line.get("role") == "assistant"] == [1, 2, 3]
    assert lines[0] == {"message": lying}
    assert (spoken.answers, conversation("t", ANSWERS).answers) == (3, 0)


def test_the_prompt_and_the_schema_want_a_number_for_each_answer():
    both = [conversation(name, ANSWERS[:count], by_turn=True) for name, count in (("a", 1), ("b", 2))]
    prompt = build(both, "By worth.", {}, random.Random(0), by_turn=True)
    assert "`turns` has one number from 0 to 1" in prompt.messages[0]["content"]
    item = prompt.schema["properties"]["scores"]["items"]
    assert item["properties"]["turns"] == {"type": "array", "items": {"type": "number"}}
    assert item["required"] == ["id", "explanation", "score", "turns"]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (None, "a has no list of turns"),
        ([0.5], "a has 1 turns; its answers have the numbers 1 to 2"),
        ([0.5, 1.5], "a turn is 1.5, which is not from 0 to 1"),
        ([0.5, True], "a turn is no number"),
    ],
)
def test_turns_that_do_not_fit_are_refused(turns, why):
    item = {"id": "a", "explanation": "so", "score": 0.5, "turns": turns}
    with pytest.raises(NotAnswered, match=why):
        read(json.dumps({"scores": [item]}), ["a"], {}, [2])
    item["turns"] = [0, 0.5]
    assert read(json.dumps({"scores": [item]}), ["a"], {}, [2]) == [AttemptScore(0.5, "so", None, (0.0, 0.5))]
