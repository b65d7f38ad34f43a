"""Limit each key's requests and tokens per minute, with buckets that refill. Pure; the clock is passed in.

A bucket holds at most a minute's worth and refills evenly. A request takes one from its bucket at once. The tokens of
an answer are known only afterwards: they are taken then, even below zero, and the next request waits until there is
something again. If several proxies run, each allows its share.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.errors import RateLimited
from proxy.http.asgi import Header
from whetstone.domain.api_keys import Principal

MOST_BUCKETS = 10_000
"""Above this, full buckets are evicted: a new one would be the same."""


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


def has_quota(principal: Principal) -> bool:
    """Return whether the key has a rate limit."""
    return principal.requests_per_min is not None or principal.tokens_per_min is not None


class RateLimiter:
    """The buckets of each key, in this process."""

    def __init__(self, other_proxies: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._other_proxies = other_proxies
        self._now_s = now_s
        self._requests: dict[tuple[str, str], _Bucket] = {}
        self._tokens: dict[tuple[str, str], _Bucket] = {}

    def check(self, principal: Principal) -> list[Header]:
        """Admit a request. Return the headers that report what is left.

        Raises:
            RateLimited: the key's requests or tokens are used up for now.
        """
        if not has_quota(principal):
            return []
        requests = self._bucket(self._requests, principal, principal.requests_per_min)
        tokens = self._bucket(self._tokens, principal, principal.tokens_per_min)
        headers = [*_limit_headers(b"requests", requests), *_limit_headers(b"tokens", tokens)]
        limits = {"requests": (requests, principal.requests_per_min), "tokens": (tokens, principal.tokens_per_min)}
        for what, (bucket, limit) in limits.items():
            if bucket is not None and bucket.level < 1:
                wait_s = math.ceil(bucket.wait_s(1))
                raise RateLimited(
                    f"the {what} of this key are used up ({limit} a minute); try again in {wait_s} s, or ask for a key "
                    "with more",
                    wait_s,
                    headers,
                )
        if requests is not None:
            requests.level -= 1
        return [*_limit_headers(b"requests", requests), *_limit_headers(b"tokens", tokens)]

    def charge_tokens(self, principal: Principal, tokens: int) -> None:
        """Charge an answer's tokens: those of the prompt and those sampled."""
        bucket = self._bucket(self._tokens, principal, principal.tokens_per_min)
        if bucket is not None:
            bucket.level -= tokens

    def _bucket(
        self, buckets: dict[tuple[str, str], _Bucket], principal: Principal, limit: int | None
    ) -> _Bucket | None:
        if limit is None or principal.key_id is None:
            return None
        # At least one, or nothing would ever pass.
        per_min, now_s = max(1.0, limit / (1 + self._other_proxies())), self._now_s()
        name = (principal.project, principal.key_id)
        if name not in buckets:
            if len(buckets) >= MOST_BUCKETS:
                _forget_full(buckets, now_s)
            buckets[name] = _Bucket(per_min, per_min, now_s)
        bucket = buckets[name]
        bucket.refill(per_min, now_s)
        return bucket


def _forget_full(buckets: dict[tuple[str, str], _Bucket], now_s: float) -> None:
    for name, bucket in list(buckets.items()):
        bucket.refill(bucket.per_min, now_s)
        if bucket.level >= bucket.per_min:
            del buckets[name]


def _limit_headers(what: bytes, bucket: _Bucket | None) -> list[Header]:
    if bucket is None:
        return []
    left = max(0, math.floor(bucket.level))
    return [
        (b"x-ratelimit-limit-" + what, str(math.floor(bucket.per_min)).encode()),
        (b"x-ratelimit-remaining-" + what, str(left).encode()),
        (b"x-ratelimit-reset-" + what, f"{bucket.wait_s(bucket.per_min):.3f}s".encode()),
    ]
