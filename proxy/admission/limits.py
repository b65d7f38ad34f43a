"""Limit what is in flight, and each key's requests and tokens per minute. Refuse encoded bodies.

A key's limits are buckets that refill: a bucket holds at most a minute's worth and refills evenly. A request takes one
from its bucket at once. The tokens of an answer are known only afterwards: they are taken then, even below zero, and
the next request waits until there is something again. If several proxies run, each allows its share.

Used from one event loop.
"""

import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from proxy.errors import Busy, RateLimited, UnsupportedEncoding
from proxy.http.asgi import EXCHANGE, Header, Receive, Routes, Scope, Send, exchange_of, headers_of
from whetstone.config.proxy import ProxySettings
from whetstone.domain.api_keys import Principal

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies are not read. They are not limited, as health checks must pass when nothing else does."""
MOST_BUCKETS = 10_000
"""Above this, full buckets are evicted: a new one would be the same."""

Counted = Literal["requests", "tokens"]


class ConcurrencyLimit:
    """Counts the requests in flight, and the bytes of their bodies."""

    def __init__(self, settings: ProxySettings) -> None:
        self._most, self._most_bytes = settings.max_in_flight, settings.max_in_flight_bytes
        self.requests = 0
        self.bytes = 0
        """Bytes of their bodies, as far as they have arrived."""

    async def serve(self, app: Routes, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and count it until it ends.

        Raises:
            UnsupportedEncoding: its body would have to be decompressed, with no bound on its size.
            Busy: too many requests are in flight. Reading the body raises it too, if all bodies together are too long.
        """
        if scope["method"] in READS:
            await app(scope, receive, send)
            return
        encoding = headers_of(scope).get(b"content-encoding", b"").strip().lower()
        if encoding not in (b"", b"identity"):
            raise UnsupportedEncoding(
                f"a body in the encoding {encoding.decode('latin-1')[:100]!r} is not read; send it as it is",
                param="content-encoding",
            )
        if self.requests >= self._most:
            raise Busy(f"{self._most} requests are in flight (setting proxy.max_in_flight); try again soon")
        exchange = exchange_of(scope)
        # A body that has already arrived will not grow.
        whole = None if exchange is None else exchange.whole_bytes()
        body = _BodyCounter(self, receive)
        self.requests += 1
        try:
            if whole is None:
                receive = body.receive
            else:
                body.add(whole)
            await app(scope, receive, send)
        finally:
            self.release(body.bytes)

    def try_acquire(self, scope: Scope, headers: Mapping[bytes, bytes]) -> int | None:
        """Count a plain request, as nearly all are: its body has arrived, is not encoded, and there is room for it.
        Return the body's size; pass it to `release`. None: it is not counted; call `serve`, which raises if there is no
        room."""
        if scope["method"] in READS or b"content-encoding" in headers:
            return None
        exchange = scope.get(EXCHANGE)
        size: int | None = None if exchange is None else exchange.whole_bytes()
        if size is None or self.requests >= self._most or self.bytes + size > self._most_bytes:
            return None
        self.requests += 1
        self.bytes += size
        return size

    def release(self, size: int) -> None:
        """Stop counting a request whose body has this size."""
        self.requests -= 1
        self.bytes -= size

    def add_bytes(self, size: int) -> None:
        """Count this many bytes of a body.

        Raises:
            Busy: the total is too large. The bytes still count until their request is over.
        """
        self.bytes += size
        if size and self.bytes > self._most_bytes:
            raise Busy(
                f"the bodies of all requests are over {self._most_bytes} bytes (setting proxy.max_in_flight_bytes); "
                "try again soon"
            )


class _BodyCounter:
    """Counts one request's body: whole, or as it arrives."""

    def __init__(self, limit: ConcurrencyLimit, receive: Receive) -> None:
        self._limit, self._receive = limit, receive
        self.bytes = 0

    def add(self, size: int) -> None:
        self.bytes += size
        self._limit.add_bytes(size)

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self.add(len(message.get("body", b"")))
        return message


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
        self._buckets: dict[Counted, dict[tuple[str, str], _Bucket]] = {"requests": {}, "tokens": {}}

    def check(self, principal: Principal) -> list[Header]:
        """Admit a request. Return the headers that report what is left.

        Raises:
            RateLimited: the key's requests or tokens are used up for now.
        """
        buckets = {what: bucket for what in self._buckets if (bucket := self._bucket(what, principal)) is not None}
        for what, bucket in buckets.items():
            if bucket.level < 1:
                wait_s = math.ceil(bucket.wait_s(1))
                raise RateLimited(
                    f"the {what} of this key are used up ({_limit(what, principal)} a minute); try again in {wait_s} "
                    "s, or ask for a key with more",
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
