"""A client that costs as little as possible: one persistent connection, and a check of each answer."""

import asyncio
import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools

from benchmarks.bench.upstream import text_of

WHOLE = ("plain", "large")
"""Kinds of answers that are not streamed."""
JSON = "content-type: application/json\r\n"
DONE = b"data: [DONE]\n\n"

_numbers = itertools.count()


@dataclass(frozen=True)
class Target:
    """Where requests go, and with which headers."""

    host: str
    port: int
    model: str
    headers: str = ""
    """More headers, each ended by CRLF."""
    base: str = "/v1"
    """The path before `/chat/completions`."""

    def request(self, kind: str) -> bytes:
        """Return a request with a prompt that was never sent before."""
        return _template(self, kind) % next(_numbers)


@functools.cache
def _template(target: Target, kind: str) -> bytes:
    talk = [
        {"role": "system", "content": "You answer at once and say little."},
        {"role": "user", "content": f"{kind} question %012d of {os.getpid()}"},
    ]
    fields: dict[str, Any] = {"model": target.model, "messages": talk, "max_tokens": 256}
    body = json.dumps(fields | ({} if kind in WHOLE else {"stream": True}), separators=(",", ":"))
    head = (
        f"POST {target.base}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\n{target.headers}"
    )
    return f"{head}content-length: {len(body.encode() % 0)}\r\n\r\n{body}".encode()


class Judge:
    """Checks answers. An answer equal to the last right one is not parsed again."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._right = b""

    def wrong(self, status: int, body: bytes) -> str | None:
        """Return what is wrong with an answer; None where nothing is."""
        if status == 200 and body == self._right:
            return None
        fault = wrong_with(self._kind, status, body)
        if fault is None:
            self._right = body
        return fault


def wrong_with(kind: str, status: int, body: bytes) -> str | None:
    """Return what is wrong with an answer to a client that requested no ids; None where nothing is."""
    excerpt = body[:200].decode("utf-8", "replace")
    if status != 200:
        return f"{status}: {excerpt}"
    try:
        if kind in WHOLE:
            chunks = [json.loads(body)]
            text = chunks[0]["choices"][0]["message"]["content"]
        else:
            pieces = [piece.removeprefix(b"data: ") for piece in body.split(b"\n\n") if piece]
            chunks = [json.loads(piece) for piece in pieces if piece != b"[DONE]"]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            if not body.endswith(DONE):
                return f"a stream without its end: {excerpt}"
        unasked = [chunk.get("prompt_token_ids") for chunk in chunks]
        unasked += [
            choice.get(name) for one in chunks for choice in one["choices"] for name in ("token_ids", "logprobs")
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"no answer of a chat ({type(error).__name__}): {excerpt}"
    if text != text_of(kind):
        return f"{len(text_of(kind))} characters were due, came {len(text)}: {excerpt}"
    # Some servers omit null fields, some write them as an empty object.
    return f"ids or logprobs that were not requested: {excerpt}" if any(unasked) else None


class Client(asyncio.Protocol):
    """One persistent connection with one request at a time.

    Calls `on_answer` for each answer, and `on_lost` if it breaks off.
    """

    def __init__(self, on_answer: Callable[["Client"], None], on_lost: Callable[["Client"], None]) -> None:
        self._on_answer, self._on_lost = on_answer, on_lost
        self._on_first: Callable[[], None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def ask(self, request: bytes, due_s: float | None = None, on_first: Callable[[], None] | None = None) -> None:
        """Send a request; its time runs from now, or from when it was due."""
        self._parts.clear()
        self.busy, self._on_first = True, on_first
        self.since_s = time.perf_counter() if due_s is None else due_s
        self._transport.write(request)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    def close(self) -> None:
        self._on_lost = lambda _client: None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._parts:
            self.first_s = time.perf_counter()
            if self._on_first is not None:
                self._on_first()
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.busy = False
        self._on_answer(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self._on_lost(self)
