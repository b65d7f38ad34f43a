"""Limit each key's requests and tokens per minute.

The limits are buckets that refill: a bucket holds at most a minute's worth and refills evenly. A request takes one
from its bucket at once. The tokens of an answer are known only afterwards: they are taken then, even below zero, and
the next request waits until there is something again. If several proxies run, each allows its share.

Used from one event loop.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.errors import RateLimited
from proxy.http.asgi import Header
from whetstone.domain.api_keys import Principal

MOST_BUCKETS = 10_000
"""Above this, full buckets are evicted: a new one would be the same."""

Counted = Literal["requests", "tokens"]


@dataclass
class _Bucket:
    per_min: float
    """Its capacity, and how much it refills in a minute."""
    level: float
    at_s: float

    def refill(self, per_min: float, now_s: float) -> None:
        self.level = min(per_min, self.level + per_min * (now_s - self.at_s) / 60)
        self.per_min, self.at_s = per_min, now_s

    def wait_s(self, least: float) -> float:
        """Return the seconds until it holds this much."""
        return max(0.0, least - self.level) * 60 / self.per_min


class RateLimiter:
    """The buckets of each key, in this process."""

    def __init__(self, other_proxies: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._other_proxies = other_proxies
        self._now_s = now_s
        self._buckets: dict[Counted, dict[tuple[str, str], _Bucket]] = {"requests": {}, "tokens": {}}

    def check(self, principal: Principal, whose: Literal["key", "feedback token"] = "key") -> list[Header]:
        """Admit a request. Return the headers that report what is left.

        Raises:
            RateLimited: the key's requests or tokens are used up for now. `whose` is what the message calls the key.
        """
        buckets = {what: bucket for what in self._buckets if (bucket := self._bucket(what, principal)) is not None}
        for what, bucket in buckets.items():
            if bucket.level < 1:
                wait_s = math.ceil(bucket.wait_s(1))
                more = ", or ask for a key with more" if whose == "key" else ""
                raise RateLimited(
                    f"the {what} of this {whose} are used up ({_limit(what, principal)} a minute); try again in "
                    f"{wait_s} s{more}",
                    wait_s,
                    _limit_headers(buckets),
                )
        if "requests" in buckets:
            buckets["requests"].level -= 1
        return _limit_headers(buckets)

    def charge_tokens(self, principal: Principal, tokens: int) -> None:
        """Charge an answer's tokens: those of the prompt and those sampled."""
        bucket = self._bucket("tokens", principal)
        if bucket is not None:
            bucket.level -= tokens

    def _bucket(self, what: Counted, principal: Principal) -> _Bucket | None:
        """Return the key's bucket, refilled; None if the key has no such limit."""
        limit = _limit(what, principal)
        if limit is None or principal.key_id is None:
            return None
        # At least one, or nothing would ever pass.
        per_min, now_s = max(1.0, limit / (1 + self._other_proxies())), self._now_s()
        buckets, name = self._buckets[what], (principal.project, principal.key_id)
        if name not in buckets:
            if len(buckets) >= MOST_BUCKETS:
                _forget_full(buckets, now_s)
            buckets[name] = _Bucket(per_min, per_min, now_s)
        bucket = buckets[name]
        bucket.refill(per_min, now_s)
        return bucket


def _limit(what: Counted, principal: Principal) -> int | None:
    return principal.requests_per_min if what == "requests" else principal.tokens_per_min


def _forget_full(buckets: dict[tuple[str, str], _Bucket], now_s: float) -> None:
    for name, bucket in list(buckets.items()):
        bucket.refill(bucket.per_min, now_s)
        if bucket.level >= bucket.per_min:
            del buckets[name]


def _limit_headers(buckets: Mapping[Counted, _Bucket]) -> list[Header]:
    return [
        header
        for what, bucket in buckets.items()
        for header in (
            (f"x-ratelimit-limit-{what}".encode(), str(math.floor(bucket.per_min)).encode()),
            (f"x-ratelimit-remaining-{what}".encode(), str(max(0, math.floor(bucket.level))).encode()),
            (f"x-ratelimit-reset-{what}".encode(), f"{bucket.wait_s(bucket.per_min):.3f}s".encode()),
        )
    ]
