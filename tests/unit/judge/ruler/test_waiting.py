"""Groups that wait for their judges: they say why, and nobody is rewarded or fails for it."""

import asyncio
import re
from contextlib import contextmanager

import pytest
from sqlalchemy import event

from judge.decisions.feedback import NOT_RANKED_IN_TIME
from judge.decisions.lifecycle import FUNCTIONS_FIRST
from judge.ruler.lease import LOOK_AGAIN_S
from judge.ruler.ranker import rank_due
from migrations import schema
from tests.unit.judge.ruler.conftest import HOUR_S, always

pytestmark = pytest.mark.slow


@contextmanager
def statements(engine):
    """Yields what is said to the database."""
    said = []

    def note(_connection, _cursor, statement, _parameters, _context, _many):
        said.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(engine, "before_cursor_execute", note)


def given_up(court, **learning):
    """A group of three whose judge never answers, when it was waited for long enough."""
    court.server.fault = always("overloaded")
    court.ruler |= {"wait_s": HOUR_S}
    court.learning = learning
    court.group(0.2, 0.9, 0.5)
    court.ask()
    court.run()
    court.after_s = 25 * HOUR_S
    court.run()
    court.server.fault = always(None)
    court.after_s += HOUR_S
    court.run()


def overdue(court):
    """A group of three past its deadline of which the app told of one; its judge has not answered yet."""
    court.learning = {"failure_reward": -1.0}
    court.server.fault = always("overloaded")
    court.group(0.2, 0.9, 0.5)
    court.seed.feedback("g0", 1.0)
    court.ask()
    court.run()
    court.after_s = 25 * HOUR_S
    court.server.fault = always(None)


@pytest.mark.parametrize("failure_reward", [None, 0.0, -1.0])
def test_a_judge_that_never_comes_leaves_attempts_without_a_reward(court, failure_reward):
    given_up(court, failure_reward=failure_reward)
    assert (court.state().state, court.state().reason) == ("discarded", "too_few")
    assert set(court.rewards().values()) == {None}
    assert court.server.calls == 1


@pytest.mark.parametrize("failure_reward", [None, 0.0, -1.0])
def test_a_judge_that_never_comes_leaves_what_the_app_said(court, failure_reward):
    court.seed.feedback("g0", 1.0)
    court.seed.feedback("g1", 0.25)
    given_up(court, failure_reward=failure_reward)
    assert court.state().state == "scored"
    assert court.rewards() == {"g0": 1.0, "g1": 0.25, "g2": None}
    assert court.trajectory("g2").state == "excluded"


def test_a_request_that_judges_never_answered_says_so_and_a_later_one_is_answered(court):
    court.seed.feedback("g0", 1.0)
    court.seed.feedback("g1", 0.25)
    given_up(court)
    (first,) = [one for one in court.view("feedback") if one["source"] == "judge"]
    assert (first["state"], first["reason"]) == ("unused", NOT_RANKED_IN_TIME)
    assert (court.state().state, court.state().judge_waits) == ("scored", None)
    later = court.ask()
    court.run()
    assert court.feedback(later).state == "applied"
    assert court.rewards() == {"g0": 1.0, "g1": 0.25, "g2": 0.5}


def test_a_judge_that_does_not_answer_keeps_all_groups_waiting_unread(court):
    court.server.fault = always("overloaded")
    court.groups(5)
    court.sweep()
    paused = {}

    def look():
        return asyncio.run(rank_due(court.engine, court.settings, lambda: court.now, paused))

    look()
    calls = court.server.calls
    for number in range(5):
        court.change(schema.groups, f"m{number}-", judge_due_at=court.now)
    with statements(court.engine) as said:
        assert look() == 5
    assert court.server.calls == calls
    assert not [one for one in said if re.search(r"(FROM|JOIN) completions", one)]
    assert all(court.state(f"m{number}-").judge_waits.startswith("local: ") for number in range(5))


def test_no_attempt_fails_while_judges_are_waited_for(court):
    overdue(court)
    court.sweep()
    assert court.state().state == "closed"
    assert court.rewards() == {"g0": 1.0, "g1": None, "g2": None}
    court.rank()
    court.sweep()
    assert court.state().state == "scored"
    assert court.rewards() == {"g0": 1.0, "g1": 0.9, "g2": 0.5}


def test_an_empty_rubric_is_waited_for(court, tmp_path):
    court.ruler["rubric"] = tmp_path / "rubric"
    court.ruler["rubric"].write_text("  \n")
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.state().judge_waits == f"the rubric {tmp_path / 'rubric'} is empty"
    assert court.server.calls == 0
    court.ruler["rubric"].write_text("Short is better.")
    court.after_s += LOOK_AGAIN_S
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def test_a_group_that_cannot_be_ranked_for_a_fault_of_ours_says_so_and_keeps_no_other_from_it(court):
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    whole = court.judgements()[0]
    court.change(schema.judgements, whole.id, scores={"g0": {"score": 0.2}})
    court.after_s = 2.0
    again = court.ask()
    court.group(0.3, 0.8, group="h", created_at=court.now)
    court.ask("h")
    court.run()
    assert court.state().judge_waits == "a fault of Whetstone's, see judge.log: KeyError"
    assert (court.state().state, court.feedback(again).state) == ("closed", "waiting")
    assert court.rewards("h") == {"h0": 0.3, "h1": 0.8}
    court.change(schema.judgements, whole.id, scores=whole.scores)
    court.after_s += LOOK_AGAIN_S
    court.run()
    assert (court.state().state, court.feedback(again).state) == ("scored", "applied")


@pytest.mark.parametrize("budget", [{"tokens_per_day": 1}, {"usd_per_day": 0.000001}])
def test_a_spent_budget_stops_judging_until_the_next_day(court, budget):
    court.judges["local"] |= {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 2.0}
    court.ruler |= budget
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.server.calls == 1
    assert "the budget of starter for" in court.state().judge_waits
    assert court.rewards() == {"g0": None, "g1": None}
    court.after_s += 24 * 3600
    court.run()
    assert court.server.calls == 2


def test_a_budget_in_money_waits_for_the_price_of_its_judge(court):
    court.ruler["usd_per_day"] = 5.0
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert "judges.local is unknown: set its usd_per_million_" in court.state().judge_waits
    assert court.server.calls == 0
    court.judges["local"] |= {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 2.0}
    court.after_s += LOOK_AGAIN_S
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


PRICES = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 2.0}


def test_the_spending_cap_of_the_stack_stops_judging_until_the_next_day(court):
    court.judges["local"] |= PRICES
    court.more = {"spending": {"usd_per_day": 0.000001}}
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.server.calls == 1
    assert "the spending cap of $0.00 a day is reached" in court.state().judge_waits
    court.after_s += 24 * 3600
    court.run()
    assert court.server.calls == 2


def test_answers_of_other_servers_count_for_the_cap_and_free_judges_go_on(court):
    upstream = {"url": "http://other/v1", "models": {"gpt": "gpt"}} | PRICES
    court.more = {"spending": {"usd_per_day": 1.0}, "upstreams": {"other": upstream}}
    court.judges["local"] |= PRICES
    row = {"base_model": "gpt", "model_path": "", "live_version": 0, "next_version": 1, "next_step": 1}
    row |= {"state": "recording", "created_at": court.seed.now, "upstream": "other"}
    court.seed.insert(schema.policies, project="default", id="gpt", **row)
    court.seed.trajectory("t", policy="gpt", turns=0)
    court.seed.completion("t", 0, policy="gpt", prompt_tokens=500_000, completion_tokens=250_000)
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.server.calls == 0
    assert "the spending cap of $1.00 a day is reached ($1.00 on" in court.state().judge_waits
    court.judges["local"] |= dict.fromkeys(PRICES, 0.0)
    court.change(schema.groups, "g", judge_due_at=court.now)
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def test_a_judge_of_unknown_price_gets_no_call_under_a_cap(court):
    court.more = {"spending": {"usd_per_day": 5.0}}
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert "judges.local is unknown: set its usd_per_million_" in court.state().judge_waits
    assert court.server.calls == 0


def test_reward_functions_come_first(court):
    court.learning = {"rewards": [{"name": "f", "run": "functions:f", "kind": "penalty"}]}
    court.group(0.2, 0.9)
    court.attempt("c", "try 2 is worth 0.4", code_due_at=court.seed.now)
    court.ask()
    court.run()
    assert court.server.calls == 0
    assert court.state().judge_waits == FUNCTIONS_FIRST
    court.change(schema.trajectories, "c", code_due_at=None)
    court.change(schema.groups, "g", due_at=court.now)
    court.run()
    assert (court.server.calls, court.state().judge_waits) == (3, None)


def test_no_attempt_fails_in_a_sweep_that_began_before_the_scores_came(court):
    overdue(court)
    court.sweep()
    court.group(0.1, 0.2, group="h")  # else nothing would be due
    looked = []

    def rank(_connection, _cursor, statement, _parameters, _context, _many):
        if "EXISTS" in statement and not looked:
            looked.append(None)
            looked.append(court.rank())

    event.listen(court.engine, "after_cursor_execute", rank)
    try:
        court.sweep()
    finally:
        event.remove(court.engine, "after_cursor_execute", rank)
    assert looked == [None, 1]
    assert court.rewards() == {"g0": 1.0, "g1": 0.9, "g2": 0.5}
    court.sweep()
    assert court.state().state == "scored"
    assert court.rewards() == {"g0": 1.0, "g1": 0.9, "g2": 0.5}
