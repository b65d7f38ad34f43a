"""RateLimiter with a clock of our own: what passes, what waits how long, and what is told of it."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admission.rate_limits import MOST_BUCKETS, RateLimiter
from proxy.errors import RateLimited
from whetstone.domain.api_keys import Principal, anybody


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def key(key_id: str = "k", requests: int | None = None, tokens: int | None = None, project: str = "p") -> Principal:
    return Principal(project, key_id, frozenset({"inference"}), requests, tokens)


def passes(limiter: RateLimiter, principal: Principal) -> int:
    """How many requests pass now."""
    for count in range(10_000):
        try:
            limiter.check(principal)
        except RateLimited:
            return count
    raise AssertionError("all of them")


def refused(limiter: RateLimiter, principal: Principal) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limiter.check(principal)
    return caught.value


def test_without_a_quota_everything_passes_and_nothing_is_kept() -> None:
    limiter = RateLimiter(lambda: 0, Clock())
    for principal in (key(), anybody("p")):
        assert all(limiter.check(principal) == [] for _ in range(1000))
        limiter.charge_tokens(principal, 10**9)
        assert limiter.check(principal) == []


def test_a_minutes_requests_pass_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    limiter = RateLimiter(lambda: 0, clock)
    assert passes(limiter, key(requests=6)) == 6
    clock.s += 9.5
    assert passes(limiter, key(requests=6)) == 0
    clock.s += 0.5
    assert passes(limiter, key(requests=6)) == 1
    clock.s += 3600
    assert passes(limiter, key(requests=6)) == 6


def test_tokens_are_charged_after_the_answer_and_must_come_back_first() -> None:
    clock = Clock()
    limiter = RateLimiter(lambda: 0, clock)
    one = key(tokens=600)
    limiter.check(one)
    limiter.charge_tokens(one, 1200)  # it had 600: 600 below zero
    error = refused(limiter, one)
    assert error.retry_after_s == 61  # 10 a second: 601 until there is one
    clock.s += 60
    refused(limiter, one)
    clock.s += 1
    limiter.check(one)


def test_what_is_refused_costs_nothing() -> None:
    clock = Clock()
    limiter = RateLimiter(lambda: 0, clock)
    one = key(requests=2, tokens=60)
    limiter.charge_tokens(one, 60)
    for _ in range(5):
        assert "tokens" in refused(limiter, one).message
    clock.s += 1
    headers = dict(limiter.check(one))
    assert headers[b"x-ratelimit-remaining-requests"] == b"1"


def test_keys_have_quotas_of_their_own_also_under_the_same_id_elsewhere() -> None:
    limiter = RateLimiter(lambda: 0, Clock())
    assert [passes(limiter, one) for one in (key("a", 3), key("b", 3), key("a", 3, project="q"))] == [3, 3, 3]


def test_of_several_proxies_each_lets_its_share_through() -> None:
    clock, others = Clock(), [3]
    limiter = RateLimiter(lambda: others[0], clock)
    one = key(requests=8)
    assert passes(limiter, one) == 2
    others[0] = 0  # the others are gone: what was missing comes back at the whole rate
    clock.s += 60
    assert passes(limiter, one) == 8
    others[0] = 99
    clock.s += 600
    assert passes(limiter, one) == 1  # never none


def test_the_refusal_is_openais_with_what_is_left_and_when_to_come_again() -> None:
    limiter = RateLimiter(lambda: 0, Clock())
    one = key(requests=2, tokens=100)
    passes(limiter, one)
    error = refused(limiter, one)
    body: Any = msgspec.json.decode(error.body())["error"]
    assert (error.status, body["code"], body["param"]) == (429, "rate_limit_exceeded", None)
    assert "2 a minute" in body["message"] and "30 s" in body["message"]
    headers = dict(error.headers())
    assert headers[b"retry-after"] == b"30"
    assert headers[b"x-ratelimit-limit-requests"] == b"2" and headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] == b"60.000s"
    assert headers[b"x-ratelimit-limit-tokens"] == headers[b"x-ratelimit-remaining-tokens"] == b"100"


def test_whoever_comes_again_when_told_passes() -> None:
    clock = Clock()
    limiter = RateLimiter(lambda: 0, clock)
    for limit in (1, 7, 61, 1000):
        one = key(str(limit), requests=limit)
        passes(limiter, one)
        clock.s += refused(limiter, one).retry_after_s or math.nan
        assert passes(limiter, one) >= 1


def test_memory_is_bounded_and_nobody_gains_by_it() -> None:
    clock = Clock()
    limiter = RateLimiter(lambda: 0, clock)
    spent = key("spent", requests=60, tokens=60)
    limiter.check(spent)
    limiter.charge_tokens(spent, 10**6)
    for number in range(MOST_BUCKETS):
        limiter.check(key(str(number), requests=60))
    clock.s += 60
    for number in range(MOST_BUCKETS):
        limiter.check(key(f"other {number}", requests=60))
    assert len(limiter._buckets["requests"]) <= MOST_BUCKETS
    assert "tokens" in refused(limiter, spent).message


@given(
    limit=st.integers(1, 500),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 200)), min_size=1, max_size=30),
)
def test_over_any_time_no_more_pass_than_a_minutes_worth_and_the_rate(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    limiter, one, passed = RateLimiter(lambda: 0, clock), key(requests=limit), 0
    for wait_s, asked in steps:
        clock.s += wait_s
        for _ in range(asked):
            try:
                limiter.check(one)
            except RateLimited:
                break
            passed += 1
        assert passed <= limit + limit * (clock.s - 1000) / 60 + 1e-6
