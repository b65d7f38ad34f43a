"""What is asked of which judge, and when: none too early or for too long, none more than it can read.

The judges say what a test tells them to. Scores that are wrong are test_faults.py's.
"""

import asyncio
import time

import pytest

from judge.ruler.ranker import rank_due
from tests.unit.judge.ruler.conftest import LONG_S, always, right
from tests.unit.judge.ruler.speaker import failure

pytestmark = pytest.mark.slow

LIMITED = (429, failure("slow down", "rate_limit"), {"Retry-After": "600"})


def test_a_judge_that_says_when_to_come_back_is_left_alone_until_then(court, speaker):
    court.named("busy", f"{speaker.server.url}/v1", concurrency=1)
    court.judges["local"]["concurrency"] = 8
    court.ruler |= {"judges": ["busy"], "judgements": 1}
    speaker.says(LIMITED, right)
    known = court.groups(4)
    court.group(0.3, 0.4, group="other")
    court.ask("other", judge={"kind": "ruler", "model": "local"})
    court.run()
    assert (len(speaker.bodies), court.server.calls) == (1, 1)
    assert court.rewards("other") == {"other0": 0.3, "other1": 0.4}
    assert all("slow down" in court.state(group).judge_waits for group in known)
    for after_s in (300, 599):
        court.after_s = 1.0 + after_s
        court.run()
        assert len(speaker.bodies) == 1
    court.after_s = 1.0 + 601
    court.run()
    assert {group: court.rewards(group) for group in known} == known
    assert len(speaker.bodies) == 1 + len(known)


def test_a_group_that_comes_while_a_judge_is_left_alone_waits_too(court, speaker):
    court.named("local", f"{speaker.server.url}/v1")
    court.ruler["judgements"] = 1
    speaker.says(LIMITED, right)
    paused = {}

    def run():
        court.sweep()
        asyncio.run(rank_due(court.engine, court.settings, lambda: court.now, paused))
        court.sweep()

    court.group(0.2, 0.9)
    court.ask()
    run()
    court.after_s += 300
    court.group(0.3, 0.4, group="h")
    court.ask("h")
    run()
    assert len(speaker.bodies) == 1
    assert "slow down" in court.state("h").judge_waits
    court.after_s += 301
    run()
    assert court.rewards() | court.rewards("h") == {"g0": 0.2, "g1": 0.9, "h0": 0.3, "h1": 0.4}


def test_an_answer_that_was_on_its_way_does_not_end_a_pause(court, speaker):
    court.named("local", f"{speaker.server.url}/v1", concurrency=2)
    court.ruler["judgements"] = 2

    def late(handler):
        deadline = time.monotonic() + 10
        while len(handler.server.asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        right(handler)

    speaker.says(late, LIMITED, right)
    court.groups(4)
    court.run()
    assert len(speaker.bodies) == 2


def test_a_judge_that_takes_too_long_is_not_waited_for(court):
    court.judges["local"]["timeout_s"] = 0.5
    court.server.fault, court.server.slow_s = always("slow"), 10.0
    court.group(0.2, 0.9)
    court.ask()
    court.sweep()
    court.rank()  # loads what asking needs
    court.after_s += LONG_S
    began = time.monotonic()
    court.rank()
    assert time.monotonic() - began < 9
    assert court.state().judge_waits == "local: it took longer than 0.5 s"
    assert court.judgements()[0].error == "local: it took longer than 0.5 s"


def up_to(most):
    """A judge whose context holds so many characters."""

    def line(handler):
        body = handler.server.asked[-1][2]
        if sum(len(message["content"]) for message in body["messages"]) > most:
            said = f"This model's maximum context length is {most // 3} tokens."
            handler.whole(400, failure(said, "invalid_request_error", "context_length_exceeded"))
        else:
            right(handler)

    return line


def long_group(court):
    court.seed.group("g")
    for place, each in enumerate((0.2, 0.9, 0.5)):
        court.attempt(f"g{place}", f"{place} and so on" + ", and on" * 1000 + f": worth {each}")
    court.ask()


def test_a_prompt_that_is_too_long_is_shortened_until_it_fits(court, speaker):
    court.named("local", f"{speaker.server.url}/v1")
    speaker.says(up_to(9000))
    long_group(court)
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "g2": 0.5}
    for one in court.judgements():
        assert one.left_out > 10_000
        assert 1 < one.calls <= 5


def test_a_prompt_that_fits_nowhere_is_not_sent_for_ever(court, speaker, spare):
    court.named("local", f"{speaker.server.url}/v1")
    speaker.says(up_to(0))
    long_group(court)
    court.run()
    assert len(speaker.bodies) == 5
    assert "context" in court.state().judge_waits
    assert set(court.rewards().values()) == {None}
    court.named("spare", spare.url)
    court.ruler["fallback"] = ["spare"]
    court.after_s += LONG_S
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9, "g2": 0.5}
    # Who can read all of it is shown all of it.
    assert {(one.judge, one.left_out) for one in court.judgements()} == {("spare", 0)}


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "check judges.local.api_key_env"), (404, "check judges.local.model")]
)
def test_a_judge_that_will_never_answer_says_what_to_do_and_another_does(court, speaker, spare, status, remedy):
    court.named("local", f"{speaker.server.url}/v1")
    speaker.says((status, failure("no such thing")))
    court.group(0.2, 0.9)
    court.ask()
    court.run()
    assert len(speaker.bodies) == 1
    assert "no such thing" in court.state().judge_waits
    assert remedy in court.state().judge_waits
    assert set(court.rewards().values()) == {None}
    court.named("spare", spare.url)
    court.ruler["fallback"] = ["spare"]
    court.after_s += LONG_S
    court.run()
    assert court.rewards() == {"g0": 0.2, "g1": 0.9}
    assert {one.judge for one in court.judgements()} == {"spare"}
