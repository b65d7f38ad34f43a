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
from urllib.parse import urlsplit

import httptools

from benchmarks.bench.upstream import text_of
from benchmarks.fakes.wire import DONE

WHOLE = ("plain", "large")
"""Kinds of answers that are not streamed."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Target:
    """Where requests go, and with which headers."""

    url: str
    model: str
    headers: str = ""
    """More headers, each ended by CRLF."""
    base: str = "/v1"
    """The path before `/chat/completions`."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = urlsplit(self.url).netloc.partition(":")
        return host, int(port)

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
    return (
        f"POST {target.base}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"content-type: application/json\r\n{target.headers}content-length: {len(body.encode() % 0)}\r\n\r\n{body}"
    ).encode()


def wrong_with(kind: str, status: int, body: bytes) -> str | None:
    """Return what is wrong with an answer to a client that requested no ids; None where nothing is."""
    excerpt = body[:200].decode("utf-8", "replace")
    if status != 200:
        return f"{status}: {excerpt}"
    try:
        if kind in WHOLE:
            chunks = [json.loads(body)]
        elif body.endswith(DONE):
            chunks = [
                json.loads(event.removeprefix(b"data: ")) for event in body.removesuffix(DONE).split(b"\n\n")[:-1]
            ]
        else:
            return f"a stream without its end: {excerpt}"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        parts = [choice["message" if kind in WHOLE else "delta"] for choice in choices]
        text = "".join(part.get("content") or "" for part in parts)
        unasked = [chunk.get("prompt_token_ids") for chunk in chunks]
        unasked += [choice.get(name) for choice in choices for name in ("token_ids", "logprobs")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
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
    def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        return self._parser.get_status_code(), b"".join(self._parts)

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
