"""While a judge is asked the world goes on: scores of what has changed are not taken, a failure costs one call at most.

Members come, steps claim, requests are withdrawn, workers die, the database goes away. The judge answers rightly, or
never: then a group waits no longer than it is told to.
"""

import asyncio
from contextlib import contextmanager

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from judge.ruler.judgement import MARGIN_S
from judge.ruler.lease import Tables, own_id
from judge.ruler.ranker import rank_due
from judge.store import ruler
from migrations import schema
from tests.unit.judge.ruler.conftest import HOUR_S, LONG_S

pytestmark = pytest.mark.slow


def test_scores_count_from_the_moment_they_are_there(court):
    court.group(0.2, 0.9)
    asked = court.ask()
    court.sweep()
    court.rank()
    assert court.feedback(asked).state == "applied"
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert {court.trajectory(name).state for name in ("g0", "g1")} == {"rewarded"}


@contextmanager
def away_at(engine, number):
    """The database fails at the write of this number, from 0, once. Yields whether it did."""
    seen = []

    def fail(_connection, _cursor, statement, _parameters, _context, _many):
        if statement.startswith(("INSERT", "UPDATE")):
            seen.append(statement)
            if len(seen) == number + 1:
                raise OperationalError(statement, {}, Exception("the server closed the connection"))

    event.listen(engine, "before_cursor_execute", fail)
    try:
        yield lambda: len(seen) > number
    finally:
        event.remove(engine, "before_cursor_execute", fail)


@pytest.mark.slow
def test_a_database_that_goes_away_at_any_write_costs_one_call_at_most(court):
    number, failed = 0, True
    while failed:
        worth_G = [(number + 1) / 1000, 0.5 + number / 1000]
        group, calls = f"d{number}-", court.server.calls
        court.group(*worth_G, group=group)
        court.ask(group)
        court.sweep()
        with away_at(court.engine, number) as happened:
            try:
                court.rank()
            except OperationalError:
                assert happened()
            else:
                assert not happened()
        failed = happened()
        court.after_s += LONG_S
        court.run()
        assert court.rewards(group) == {f"{group}{place}": each for place, each in enumerate(worth_G)}
        assert court.server.calls - calls <= 3 + 1
        number += 1
    assert number > 10


def test_a_group_that_a_dead_worker_held_is_looked_at_when_its_time_is_over(court):
    court.group(0.2, 0.9)
    court.ask()
    court.sweep()

    async def take():
        until = court.now + (court.now - court.seed.now) * MARGIN_S  # after_s is 1
        tables = Tables(court.engine, lambda: court.now)
        return await tables.write(lambda connection: ruler.take(connection, court.now, until))

    assert asyncio.run(take()).id == "g"
    for after_s in (0, MARGIN_S - 1):
        court.after_s = 1.0 + after_s
        assert court.run() == 0
    assert court.server.calls == 0
    court.after_s = 1.0 + MARGIN_S
    court.run()
    assert court.server.calls == 3
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def test_a_worker_that_dies_in_its_call_costs_that_call(court):
    court.server.fault = lambda number, _rng: "slow" if number == 1 else None
    court.group(0.2, 0.9)
    court.ask()
    court.sweep()

    async def dies():
        working = asyncio.ensure_future(rank_due(court.engine, court.settings, lambda: court.now))
        while court.server.calls < 2:
            await asyncio.sleep(0.02)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(dies())
    court.after_s += 20 + MARGIN_S - 1
    court.run()
    assert court.server.calls == 2
    court.after_s += 2
    court.run()
    assert court.server.calls == 4
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}


def meanwhile(court, number, happens):
    """Something happens while the call of this number is under way."""

    def fault(at, _rng):
        if at == number:
            happens()

    court.server.fault = fault


@pytest.mark.parametrize("number", [0, 2])
def test_scores_of_members_that_are_no_longer_all_are_not_taken(court, number):
    def late():
        court.attempt("late", "try 2 is worth 0.6", placed_at=None)
        court.sweep()

    meanwhile(court, number, late)
    court.group(0.2, 0.9)
    asked = court.ask()
    court.sweep()
    court.rank()
    # What is stored of two attempts is no judgement of three: all that are needed of those were asked for.
    assert court.server.calls == number + 1 + 3
    assert court.feedback(asked).rewards == {"g0": 0.2, "g1": 0.9, "late": 0.6}
    court.sweep()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "late": 0.6}


def test_a_member_that_nobody_has_noticed_yet_has_all_ranked_anew(court):
    meanwhile(court, 2, lambda: court.attempt("late", "try 2 is worth 0.6", placed_at=None))
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert court.state().state == "closed"
    assert court.state().judged_at is None
    court.after_s += LONG_S
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "late": 0.6}
    assert court.state().state == "scored"


def test_an_attempt_that_went_on_is_ranked_by_what_it_became(court):
    meanwhile(court, 2, lambda: court.goes_on("g0", "now worth 0.05"))
    court.group(0.2, 0.9)
    asked = court.ask()
    court.run()
    assert court.rewards() == {"g0": 0.05, "g1": 0.9}
    assert court.feedback(asked).rewards == court.rewards()
    assert (court.state().state, court.server.calls) == ("scored", 6)


def test_a_retry_that_replaces_a_member_while_a_judge_is_asked_has_all_ranked_anew(court):
    court.learning = {"failure_reward": -1.0}
    meanwhile(court, 2, lambda: court.retried("g0", "retry", "worth 0.95"))
    court.group(0.2, 0.9, 0.5)
    court.ask()
    court.run()
    assert court.rewards() == {"g0": None, "g1": 0.9, "g2": 0.5, "retry": 0.95}
    assert (court.state().state, court.state().size, court.server.calls) == ("scored", 3, 6)


@pytest.mark.parametrize("state", ["open", "ended"])
def test_a_retry_that_replaces_a_member_after_the_verdict_has_all_ranked_anew(court, state):
    court.learning = {"failure_reward": -1.0}
    court.group(0.2, 0.9, 0.5)
    court.ask()
    court.run()
    court.after_s = 5.0
    began = {"created_at": court.now, "last_seen_at": court.now}
    court.retried("g0", "retry", "worth 0.95", state=state, ended_at=None if state == "open" else court.now, **began)
    court.run()
    court.after_s += HOUR_S  # by now it is idle
    court.run()
    assert court.trajectory("retry").reward == 0.95
    assert court.trajectory("retry").reward_source == "judge"
    assert (court.state().state, court.state().size, court.server.calls) == ("scored", 3, 6)


def test_a_retry_that_began_before_the_verdict_and_is_told_of_after_it_has_all_ranked_anew(court):
    court.learning = {"failure_reward": -1.0}
    court.group(0.2, 0.9, 0.5)
    court.ask()
    court.run()
    court.after_s = 5.0
    court.retried("g0", "retry", "worth 0.95", state="open", ended_at=None, last_seen_at=court.now)
    court.seed.feedback("retry", source="end", created_at=court.now)
    court.run()
    court.after_s += 1
    court.run()
    assert (court.trajectory("retry").reward, court.state().state) == (0.95, "scored")


def test_scores_for_a_group_that_a_step_has_claimed_come_too_late(court):
    def claim():
        g = schema.groups.c
        with court.engine.begin() as connection:
            connection.execute(schema.groups.update().where(g.id == "g").values(state="claimed", step=4))

    meanwhile(court, 2, claim)
    court.group(0.2, 0.9)
    asked = court.ask()
    court.run()
    assert court.feedback(asked).rewards is None
    assert set(court.rewards().values()) == {None}
    assert court.state().judged_at is None
    court.after_s += LONG_S
    court.run()
    assert court.server.calls == 3
    assert court.feedback(asked).reason == "trained in step 4"


def test_scores_that_nobody_waits_for_any_more_are_not_taken(court):
    def too_late():
        court.after_s = 25 * HOUR_S
        court.sweep()

    court.ruler["wait_s"] = HOUR_S
    meanwhile(court, 2, too_late)
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert (court.state().state, court.state().reason) == ("discarded", "too_few")
    assert set(court.rewards().values()) == {None}


def test_scores_of_a_request_that_was_withdrawn_meanwhile_are_not_taken(court):
    court.group(0.2, 0.9)
    asked = court.ask()

    def back():
        court.withdraw(asked)
        court.sweep()

    meanwhile(court, 1, back)
    court.run()
    court.after_s += LONG_S
    court.run()
    assert set(court.rewards().values()) == {None}
    assert court.feedback(asked).state == "withdrawn"


def test_a_request_during_a_call_is_answered_by_the_calls_under_way(court):
    looked = []

    def again():
        court.after_s += 1
        court.ask()
        court.sweep()
        looked.append(court.rank())

    meanwhile(court, 1, again)
    court.group(0.2, 0.9)
    first = court.ask()
    court.run()
    assert looked == [0]
    assert court.server.calls == 3
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert court.state().state == "scored"
    assert court.feedback(first).state == "superseded"


def test_where_the_later_of_two_requests_is_withdrawn_the_earlier_is_answered(court):
    court.group(0.2, 0.9)
    first = court.ask()
    court.sweep()
    court.after_s = 2.0
    second = court.ask()
    meanwhile(court, 2, lambda: court.withdraw(second))
    court.run()
    court.after_s += LONG_S
    court.run()
    assert [court.feedback(one).state for one in (first, second)] == ["applied", "withdrawn"]
    assert court.feedback(first).rewards == court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert (court.state().state, court.server.calls) == ("scored", 3)


def test_a_ranking_of_ours_that_was_withdrawn_costs_no_call_when_a_member_comes(court):
    court.ruler["rank"] = "all"
    court.group(0.2, 0.9, close_asked_at=court.seed.now)
    court.run()
    court.withdraw(own_id("g"))
    court.after_s = 3.0
    court.run()
    court.attempt("late", "worth 0.4", placed_at=None)
    court.after_s = 6.0
    court.run()
    assert court.server.calls == 3
    assert set(court.rewards().values()) == {None}
    assert (court.state().judge_due_at, court.state().judge_waits) == (None, None)
