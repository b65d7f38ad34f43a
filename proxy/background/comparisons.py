"""Send the calls of comparisons in the background: as an app would, so that each is recorded, but as evaluation.

The answers are read from the database. Only what went wrong is remembered here, for the page that waits for them.
"""

import asyncio
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.errors import Busy, ProxyError
from proxy.http.asgi import PRINCIPAL, Receive, Routes
from proxy.supervision import note_unexpected, unexpected
from whetstone.domain.api_keys import Principal

PATH = "/v1/chat/completions"
PART = "comparisons"
"""Name under which unexpected errors are counted."""
AT_ONCE = 4
"""Most calls of a project at the same time: apps wait for few of them at most."""
MOST_WAITING = 64
"""Most calls of a project that are sent or wait; a comparison beyond that is refused."""
TIMEOUT_S = 600.0
"""Longest time of one call, without its wait for the others."""
MOST_FAILURES = 1_000
"""Failures that are remembered, the newest."""


@dataclass(frozen=True)
class EvaluationCall:
    """One call: its trajectory, the body, and the headers that name the trajectory and make it an evaluation."""

    trajectory_id: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Comparisons:
    """Sends the calls of one project. Used from one event loop."""

    def __init__(self, serve: Routes, timeout_s: float = TIMEOUT_S) -> None:
        """`serve`: serves a chat completion, and raises a ProxyError only before anything was sent."""
        self._serve, self._timeout_s = serve, timeout_s
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: dict[str, str] = {}
        unexpected[PART] += 0

    @property
    def waiting(self) -> int:
        """Return how many calls are not complete."""
        return len(self._tasks)

    def start(self, calls: Sequence[EvaluationCall], principal: Principal) -> None:
        """Begin to send these calls, on behalf of this principal.

        Raises:
            Busy: too many wait already; none of these is sent.
        """
        if self.waiting + len(calls) > MOST_WAITING:
            raise Busy(f"{self.waiting} answers of other comparisons are not complete; try again when they are")
        for call in calls:
            task = asyncio.get_running_loop().create_task(self._send(call, principal))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def failure(self, trajectory_id: str) -> str | None:
        """Return why a call got no answer; None if it has one, or may still get one."""
        return self._failures.get(trajectory_id)

    async def close(self) -> None:
        """Cancel what is not complete; it is recorded as broken off."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, call: EvaluationCall, principal: Principal) -> None:
        answer = _Answer()
        body = msgspec.json.encode(call.body)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **call.headers}
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            PRINCIPAL: principal,
        }
        try:
            async with self._slots, asyncio.timeout(self._timeout_s):
                await self._serve(scope, _receive_of(body), answer)
        except ProxyError as error:
            self._fail(call, error.message)
        except TimeoutError:
            self._fail(call, f"there was no answer within {self._timeout_s:g} s")
        except Exception as error:
            note_unexpected(PART, f"call {call.trajectory_id}", error)
            self._fail(call, "an internal error; the proxy's log has it")
        else:
            if answer.status != 200:
                self._fail(call, answer.error())

    def _fail(self, call: EvaluationCall, why: str) -> None:
        self._failures[call.trajectory_id] = why
        while len(self._failures) > MOST_FAILURES:
            del self._failures[next(iter(self._failures))]


class _Answer:
    """A `send` that collects the answer."""

    def __init__(self) -> None:
        self.status = 0
        self._body = b""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._body += message.get("body", b"")

    def error(self) -> str:
        """Return the message of an error in OpenAI's shape."""
        try:
            return str(msgspec.json.decode(self._body)["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return f"status {self.status}"


def _receive_of(body: bytes) -> Receive:
    """Return a `receive` with this body, of an app that never disconnects."""
    came = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal came
        if came:
            await asyncio.Event().wait()
        came = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
