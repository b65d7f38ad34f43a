"""Quotas: so many requests and tokens a minute for each key, as buckets that refill. Pure; the clock is given.

A bucket holds a minute's worth at most and refills evenly. A request takes one from the bucket of requests, at once.
What an answer costs is known only afterwards: its tokens are taken then, even below zero, and the next request waits
until there is something again. Of several proxies each lets its share through.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from proxy.asgi import Header
from proxy.errors import RateLimited
from whetstone.keys import Principal

MOST_BUCKETS = 10_000
"""Above it those that are full again are forgotten: they would be made anew just so."""


@dataclass
class _Bucket:
    per_min: float
    """What it holds, and gets back in a minute."""
    level: float
    at_s: float

    def refill(self, per_min: float, now_s: float) -> None:
        self.level = min(per_min, self.level + per_min * (now_s - self.at_s) / 60)
        self.per_min, self.at_s = per_min, now_s

    def wait_s(self, least: float) -> float:
        """Until it has so much."""
        return max(0.0, least - self.level) * 60 / self.per_min


def has_quota(principal: Principal) -> bool:
    """Whether there is anything that its key may use up."""
    return principal.requests_per_min is not None or principal.tokens_per_min is not None


class Quotas:
    """What each key has left here."""

    def __init__(self, other_proxies: Callable[[], int], now_s: Callable[[], float] = time.monotonic) -> None:
        self._other_proxies = other_proxies
        self._now_s = now_s
        self._requests: dict[tuple[str, str], _Bucket] = {}
        self._tokens: dict[tuple[str, str], _Bucket] = {}

    def take(self, principal: Principal) -> list[Header]:
        """Let a request through; the headers that say what is left.

        Raises:
            RateLimited: the key's requests or tokens are used up for now.
        """
        if not has_quota(principal):
            return []
        requests = self._bucket(self._requests, principal, principal.requests_per_min)
        tokens = self._bucket(self._tokens, principal, principal.tokens_per_min)
        headers = [*_told(b"requests", requests), *_told(b"tokens", tokens)]
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
        return [*_told(b"requests", requests), *_told(b"tokens", tokens)]

    def charge(self, principal: Principal, tokens: int) -> None:
        """Count what an answer took: its prompt's tokens and those sampled."""
        bucket = self._bucket(self._tokens, principal, principal.tokens_per_min)
        if bucket is not None:
            bucket.level -= tokens

    def _bucket(
        self, buckets: dict[tuple[str, str], _Bucket], principal: Principal, limit: int | None
    ) -> _Bucket | None:
        if limit is None or principal.key_id is None:
            return None
        # One at least, or nothing would ever pass.
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


def _told(what: bytes, bucket: _Bucket | None) -> list[Header]:
    if bucket is None:
        return []
    left = max(0, math.floor(bucket.level))
    return [
        (b"x-ratelimit-limit-" + what, str(math.floor(bucket.per_min)).encode()),
        (b"x-ratelimit-remaining-" + what, str(left).encode()),
        (b"x-ratelimit-reset-" + what, f"{bucket.wait_s(bucket.per_min):.3f}s".encode()),
    ]
