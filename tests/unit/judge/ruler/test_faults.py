"""Judges that err: a group gets the right rewards or waits for them, and says why. Never wrong ones, never 0."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fakes.judge import FAULTS, WRONG
from judge.decisions.model import Turn
from judge.ruler.aggregate import verdict
from judge.ruler.conversation import conversation
from judge.ruler.parse import NotAnswered, read
from judge.ruler.prompt import build
from judge.ruler.ranking_input import material
from tests.unit.judge.ruler.conftest import HOUR_S, LONG_S, always, right, say
from whetstone.config.rewards import RulerSettings

pytestmark = pytest.mark.slow


def sometimes(share, *faults):
    return lambda _number, rng: rng.choice(faults) if rng.random() < share else None


def hurried(court, fault):
    """Where a fault takes time, the judge has little of it."""
    if fault == "slow":
        court.judges["local"]["timeout_s"] = 0.5


def ranked_in_rounds(court, known, most=60, approximately=False):
    """Rounds until every group has its rewards; in none of them has an attempt another than its own."""
    for _ in range(most):
        court.run()
        found = {group: court.rewards(group) for group in known}
        for group, rewards in found.items():
            expected = {name: known[group][name] if reward is not None else None for name, reward in rewards.items()}
            assert rewards == (pytest.approx(expected, abs=1e-9) if approximately else expected)
            # All at once: half of a ranking ranks nothing.
            assert len({reward is None for reward in rewards.values()}) == 1
        if all(None not in rewards.values() for rewards in found.values()):
            return
        court.after_s += HOUR_S
    raise AssertionError("some group was never ranked")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_judge_that_is_always_wrong_rewards_nothing_until_it_is_well_again(court, fault):
    hurried(court, fault)
    court.server.fault = always(fault)
    court.group(0.2, 0.9, 0.5)
    asked = court.ask()
    each = 3 if fault in WRONG else 1
    for number in range(1, 4):
        court.run()
        # Who stands still asks no more.
        court.run()
        assert court.server.calls == number * each
        assert set(court.rewards().values()) == {None}
        assert court.state().state == "closed"
        first, *others = court.judgements()
        assert court.state().judge_waits == first.error
        assert first.error.startswith("local")
        assert (first.state, first.calls, first.scores) == ("waiting", number * each, None)
        assert all(one.calls == 0 and one.error is None for one in others)
        assert (court.feedback(asked).state, court.feedback(asked).rewards) == ("waiting", None)
        court.after_s += LONG_S
    court.server.fault = always(None)
    court.judges["local"]["timeout_s"] = 20
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "g2": 0.5}
    assert (court.state().state, court.state().judge_waits) == ("scored", None)
    assert all(one.error is None and one.state == "accepted" for one in court.judgements())
    (day, *_) = court.view("admin_judge_days")
    assert day["refused"] + day["failed"] == day["calls"] - 3


def test_waiting_grows_with_every_failure(court):
    court.server.fault = always("not JSON")
    court.group(0.2, 0.9)
    court.ask()
    waits = []
    for _ in range(4):
        court.run()
        waits.append((court.state().judge_due_at - court.now).total_seconds())
        court.after_s += LONG_S
    for wait, failures in zip(waits, (3, 6, 9, 12), strict=True):
        assert 0.75 * min(2**failures, 2880) <= wait <= 1.25 * min(2**failures, 2880)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_judge_that_is_wrong_now_and_then_gives_right_rewards_or_none(court, fault):
    hurried(court, fault)
    court.ruler["judgements"] = 2
    known = court.groups(10)
    court.server.fault = sometimes(0.3, fault)
    ranked_in_rounds(court, known)
    assert court.server.calls > 20


@pytest.mark.slow
def test_all_that_can_go_wrong_at_once_gives_right_rewards_or_none(court):
    hurried(court, "slow")
    known = court.groups(25)
    court.server.fault = sometimes(0.3, *FAULTS)
    ranked_in_rounds(court, known)


def test_a_group_read_in_parts_is_ranked_rightly_or_not_at_all(court):
    court.ruler |= {"attempts_per_call": 4, "judgements": 2}
    known = court.groups(2, members=9)
    court.server.fault = sometimes(0.3, *WRONG, "broken", "cut")
    ranked_in_rounds(court, known, approximately=True)


def test_two_judges_of_which_one_errs_give_right_rewards_or_none(court, spare):
    court.named("spare", spare.url)
    court.ruler |= {"judges": ["local", "spare"], "judgements": 2}
    known = court.groups(4)
    court.server.fault = sometimes(0.6, *WRONG, "broken")
    ranked_in_rounds(court, known)
    assert {one.judge for one in court.judgements("m0-")} == {"local", "spare"}


@pytest.mark.parametrize("fault", [*WRONG, "overloaded"])
def test_what_one_judge_does_not_give_its_fallback_does(court, spare, fault):
    court.named("spare", spare.url)
    court.ruler["fallback"] = ["local", "spare"]
    court.server.fault = always(fault)
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert {(one.judge, one.error) for one in court.judgements()} == {("spare", None)}
    # One that is down is left alone: the other two judgements pass it over.
    assert court.server.calls == (9 if fault in WRONG else 1)
    assert spare.calls == 3


def test_where_the_fallback_fails_too_the_first_is_asked_first_again(court, spare):
    court.named("spare", spare.url)
    court.ruler["fallback"] = ["spare"]
    court.server.fault = spare.fault = always("short")
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert (court.server.calls, spare.calls) == (3, 3)
    assert court.judgements()[0].judge == "local"
    court.after_s += LONG_S
    court.server.fault = always(None)
    court.run()
    assert (court.server.calls, spare.calls) == (6, 3)
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def without_a_part(items):
    items[0]["parts"].pop("brief")


def with_a_part_more(items):
    items[0]["parts"]["tone"] = 0.5


def with_a_part_too_large(items):
    items[-1]["parts"]["right"] = 1.5


def with_a_score_instead(items):
    items[0] |= {"score": 0.5}
    del items[0]["parts"]


def test_parts_that_are_not_those_asked_for_are_refused(court, speaker):
    court.named("local", f"{speaker.server.url}/v1")
    court.ruler |= {"parts": {"right": 3.0, "brief": 1.0, "unused": 0.0}, "judgements": 2, "tries": 5}

    def wrongly(change):
        def line(handler):
            handler.whole = lambda status, content: None
            right(handler)
            del handler.whole
            change(handler.server.items)
            say(handler, handler.server.items)

        return line

    wrong = (without_a_part, with_a_part_more, with_a_part_too_large, with_a_score_instead)
    speaker.says(*map(wrongly, wrong), right)
    court.group(0.2, 0.8)
    court.ask()
    court.run()
    # (3·w + 1·w/2) / 4
    assert court.rewards() == pytest.approx({"g0": 0.2 * 3.5 / 4, "g1": 0.8 * 3.5 / 4})
    first, second = court.judgements()
    assert (first.calls, second.calls) == (5, 1)
    assert first.scores["g1"]["parts"] == {"right": 0.8, "brief": 0.4}


WORTH = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
NO_SCORES = st.sampled_from([None, "0.5", True, [0.5], {}, 7, -3, 1.0001, -0.0001, 1e308, math.nan, math.inf])


@st.composite
def told(draw, ids, scores):
    """An answer, right or wrong. What it says of an attempt by its id is its worth, or no score at all."""
    items = [{"id": name, "explanation": "so", "score": scores[name]} for name in draw(st.permutations(ids))]
    place = draw(st.integers(0, len(items) - 1))
    match draw(st.sampled_from(["right", "fenced", "shorter", "twice", "id", "score", "field", "text", "rest"])):
        case "fenced":
            return f"```json\n{json.dumps({'scores': items})}\n```"
        case "shorter":
            del items[place]
        case "twice":
            items.insert(draw(st.integers(0, len(items))), items[place] | {"score": draw(WORTH)})
        case "id":
            items[place] = items[place] | {"id": draw(st.sampled_from(ids) | st.text(max_size=8) | st.integers())}
            if items[place]["id"] in ids and sorted(item["id"] for item in items) == sorted(ids):
                items[place]["score"] = scores[items[place]["id"]]
        case "score":
            items[place]["score"] = draw(NO_SCORES)
        case "field":
            del items[place][draw(st.sampled_from(["id", "explanation", "score"]))]
        case "text":
            return draw(st.text(max_size=40) | st.sampled_from(["null", "[]", "{}", '{"scores": {}}']))
        case "rest":
            whole = json.dumps({"scores": items})
            return draw(st.sampled_from(["", "Here: "])) + whole[: draw(st.integers(0, len(whole)))]
    return json.dumps({"scores": items})


@settings(max_examples=150, deadline=None)
@given(data=st.data(), worth_G=st.lists(WORTH, min_size=1, max_size=7), most=st.sampled_from([3, 8]))
def test_from_the_prompt_to_the_reward_an_attempt_gets_its_worth_or_nothing(data, worth_G, most):
    conversations = [
        conversation(f"t{place}", [Turn(False, [], {"role": "assistant", "content": f"worth {each}"}, None, None)])
        for place, each in enumerate(worth_G)
    ]
    group = material("g", conversations, "By worth.", RulerSettings(attempts_per_call=most))
    of_attempt = [float(one.lines[-1].split("worth ")[1].split('"')[0]) for one in group.attempts]
    rng = random.Random(data.draw(st.integers(0, 100)))
    judgements = {}
    for section, part in enumerate(group.sections):
        for place in range(data.draw(st.integers(1, 3))):
            for _ in range(3):
                prompt = build([group.attempts[one] for one in part], group.rubric, group.parts, rng)
                known = {name: of_attempt[one] for name, one in zip(prompt.ids, part, strict=True)}
                try:
                    scored = read(data.draw(told(prompt.ids, known)), prompt.ids, group.parts)
                except NotAnswered:
                    continue
                judgements[section, place] = group.read(section, group.stored(section, scored, prompt.order))
                break
    if {section for section, _ in judgements} != set(range(len(group.sections))):
        return  # it waits
    scores_G = verdict(len(group.attempts), judgements).scores_G
    rewards = {one: score for ids, score in zip(group.trajectories, scores_G, strict=True) for one in ids}
    assert rewards == pytest.approx({f"t{place}": each for place, each in enumerate(worth_G)}, abs=1e-9)
