"""Calls of comparisons: some at once, bounded, cancelled at the end; what went wrong is remembered for a while."""

import asyncio
from typing import Any

import pytest

from proxy.background.comparisons import AT_ONCE, MOST_WAITING, Comparisons, EvaluationCall
from proxy.errors import Busy, UnknownModel
from proxy.http.asgi import PRINCIPAL, headers_of, read_whole, send_whole
from whetstone.domain.api_keys import anybody

PRINCIPAL_OF_ALL = anybody("default")


def calls(count: int, **body: Any) -> list[EvaluationCall]:
    return [EvaluationCall(f"t{number}", body, {"X-Split": "eval"}) for number in range(count)]


class FakeEndpoint:
    """Answers when it is released."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.running = self.most = self.cancelled = 0
        self.release = asyncio.Event()
        self.error: Exception | None = None
        self.status, self.body = 200, b"{}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        self.bodies.append(await read_whole(receive, 1000, 5.0))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        await send_whole(send, self.status, [], self.body)


async def until_idle(made: Comparisons) -> None:
    async with asyncio.timeout(10):
        while made.waiting:
            await asyncio.sleep(0)


def test_few_calls_at_once_with_their_headers_and_principal() -> None:
    async def run() -> None:
        endpoint = FakeEndpoint()
        made = Comparisons(endpoint)
        made.start(calls(3 * AT_ONCE, model="m"), PRINCIPAL_OF_ALL)
        while endpoint.running < AT_ONCE:
            await asyncio.sleep(0)
        endpoint.release.set()
        await until_idle(made)
        assert (endpoint.most, len(endpoint.scopes)) == (AT_ONCE, 3 * AT_ONCE)
        scope = endpoint.scopes[0]
        assert headers_of(scope)[b"x-split"] == b"eval" and headers_of(scope)[b"content-type"] == b"application/json"
        assert (scope["path"], scope[PRINCIPAL]) == ("/v1/chat/completions", PRINCIPAL_OF_ALL)
        assert endpoint.bodies[0] == b'{"model":"m"}' and made.failure("t0") is None

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "status", "body", "why"),
    [
        (UnknownModel("no such model"), 200, b"", "no such model"),
        (None, 404, b'{"error": {"message": "not loaded"}}', "not loaded"),
        (None, 502, b"<html>", "status 502"),
        (RuntimeError("x"), 200, b"", "an internal error; the proxy's log has it"),
    ],
)
def test_what_went_wrong_is_remembered(error: Exception | None, status: int, body: bytes, why: str) -> None:
    async def run() -> None:
        endpoint = FakeEndpoint()
        endpoint.error, endpoint.status, endpoint.body = error, status, body
        endpoint.release.set()
        made = Comparisons(endpoint)
        made.start(calls(1), PRINCIPAL_OF_ALL)
        await until_idle(made)
        assert made.failure("t0") == why and made.failure("t1") is None

    asyncio.run(run())


def test_a_call_that_takes_too_long_is_given_up() -> None:
    async def run() -> None:
        made = Comparisons(FakeEndpoint(), timeout_s=0.01)
        made.start(calls(1), PRINCIPAL_OF_ALL)
        await until_idle(made)
        assert made.failure("t0") == "there was no answer within 0.01 s"

    asyncio.run(run())


def test_too_many_are_refused_and_the_end_cancels_all() -> None:
    async def run() -> None:
        endpoint = FakeEndpoint()
        made = Comparisons(endpoint)
        made.start(calls(MOST_WAITING), PRINCIPAL_OF_ALL)
        with pytest.raises(Busy):
            made.start(calls(1), PRINCIPAL_OF_ALL)
        while endpoint.running < AT_ONCE:
            await asyncio.sleep(0)
        await made.close()
        assert (endpoint.cancelled, endpoint.running, len(endpoint.scopes)) == (AT_ONCE, 0, AT_ONCE)

    asyncio.run(run())
