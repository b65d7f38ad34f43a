"""The apps of `soak`: what an app does, what it saw, and what it should not have seen."""

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.fakes.vllm import HARMLESS, STATUSES, Fate, Plan, plan_of, words_of
from benchmarks.fakes.wire import CHAT, TEXT


@dataclass(frozen=True)
class Dialect:
    """Where apps send requests in a dialect, and how its stream ends."""

    path: str
    last_words: bytes
    """Part of the event with the finish reason."""
    end: bytes
    """Part of the event that ends a whole stream."""
    field: str
    """Where a request has its words."""


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DIALECTS = {
    "chat": Dialect(CHAT, b'"finish_reason":"stop"', b"data: [DONE]\n\n", "messages"),
    "completions": Dialect(TEXT, b'"finish_reason":"stop"', b"data: [DONE]\n\n", "prompt"),
    "messages": Dialect(MESSAGES, b'"stop_reason":"end_turn"', b'"type":"message_stop"', "messages"),
    "responses": Dialect(RESPONSES, b'"type":"response.output_text.done"', b'"type":"response.completed"', "input"),
}
WHY_REFUSED = ("id", "split", "json", "field", "model")
MOMENTS = ("asking", "early", "midway", "late")
"""When an app hangs up: before its body is sent, before an answer, within it, at its last words."""
LEAVING, WRONG = 0.15, 1 / 30
"""Share of the apps that hang up, and of the requests that the proxy has to refuse."""


@dataclass(frozen=True)
class Ask:
    """What an app does: request `number`."""

    number: int
    dialect: Dialect
    plan: Plan
    """What the model server will do, if the request reaches it."""
    refused: str | None
    """What is wrong with the request; it must not reach the model server."""
    leaves: str | None
    """One of MOMENTS; None: the app stays."""
    patience_s: float
    """How long it waits if it leaves early."""
    patience_bytes: int
    """How much it sends or reads if it leaves in the middle."""
    headers: dict[str, str]

    def body(self) -> bytes:
        """Return the request's body."""
        words, name = words_of(self.number), self.dialect.field
        fields: dict[str, Any] = {"model": "unknown" if self.refused == "model" else "soak"}
        fields[name] = [{"role": "user", "content": words}] if name == "messages" else words
        if self.dialect.path == MESSAGES:
            fields["max_tokens"] = 4096
        if self.plan.streamed:
            fields["stream"] = True
        if self.refused == "field":
            fields["cache_salt"] = "mine"
        whole = json.dumps(fields).encode()
        return whole[:-1] if self.refused == "json" else whole


@dataclass
class ReceivedAnswer:
    """What the app received."""

    ask: Ask
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    left: bool = False
    """It hung up before the answer was complete."""
    broken: bool = False
    """The answer broke off."""

    @property
    def whole(self) -> bool:
        """Whether it got the complete answer."""
        return not self.left and not self.broken

    def text(self) -> str:
        """Return the received text of the answer.

        Raises:
            ValueError: the data is no answer, or contains ids or logprobs that only capture requested.
        """
        if self.status != 200 or not (self.ask.plan.streamed or self.whole):
            return ""
        lines = [line for event in self.body.split(b"\n\n")[:-1] for line in event.split(b"\n")]
        events = [line[6:] for line in lines if line.startswith(b"data: ") and line != b"data: [DONE]"]
        pieces = events if self.ask.plan.streamed else [self.body]
        return "".join(text for piece in pieces for text in _texts(json.loads(piece)))


def _texts(piece: dict[str, Any]) -> Iterator[str]:
    """Yield the texts in an answer, or in an event of one, of any dialect."""
    for choice in piece.get("choices", ()):
        if choice.get("token_ids") or choice.get("logprobs"):
            raise ValueError("ids or logprobs that were not requested")
        yield (choice.get("delta") or choice.get("message") or {}).get("content") or choice.get("text") or ""
    if piece.get("type") == "message":
        yield from (block["text"] for block in piece["content"])
    if piece.get("type") == "content_block_delta":
        yield piece["delta"]["text"]
    if piece.get("object") == "response":
        yield from (part["text"] for item in piece["output"] for part in item["content"])
    if piece.get("type") == "response.output_text.delta":
        yield piece["delta"]


def ask_of(seed: int, number: int, dialects: list[Dialect]) -> Ask:
    """Return request `number`: half are streams, some of the apps hang up, some of the requests are wrong."""
    dice = random.Random(f"{seed}/app/{number}")
    plan = plan_of(seed, number, streamed=dice.random() < 0.5)
    refused = dice.choice(WHY_REFUSED) if dice.random() < WRONG else None
    leaves = dice.choice(MOMENTS) if dice.random() < LEAVING and refused is None else None
    dialect = dice.choice(dialects)
    if plan.fate is Fate.NO_CHOICES and dialect.path not in (CHAT, TEXT):
        dialect = DIALECTS["chat"]  # the others cannot express an answer without a choice
    headers = {"content-type": "application/json"}
    if dice.random() < 0.3:
        headers["x-trajectory-id"] = f"t{number // 3}"
    if dice.random() < 0.2:
        headers["x-group-id"] = f"g{number // 8}"
    if refused == "id":
        headers["x-trajectory-id"] = "no id"
    if refused == "split":
        headers["x-split"] = "test"
    return Ask(
        number=number,
        dialect=dialect,
        plan=plan,
        refused=refused,
        leaves=leaves,
        patience_s=dice.random() * 0.03,
        patience_bytes=dice.randrange(20 if leaves == "asking" else 3000),
        headers=headers,
    )


async def ask(session: aiohttp.ClientSession, url: str, request: Ask) -> ReceivedAnswer:
    """Send one request, and leave at the planned moment."""
    if request.leaves == "asking":
        return await _ask_half(url, request)
    seen = ReceivedAnswer(request)
    early = request.patience_s if request.leaves == "early" else None
    try:
        async with (
            asyncio.timeout(early),
            session.post(url + request.dialect.path, data=request.body(), headers=request.headers) as response,
        ):
            seen.status = response.status
            seen.headers = {name.lower(): value for name, value in response.headers.items()}
            async for data in response.content.iter_any():
                seen.body += data
                midway = request.leaves == "midway" and len(seen.body) > request.patience_bytes
                if midway or (request.leaves == "late" and request.dialect.last_words in seen.body):
                    seen.left = not response.content.at_eof()
                    response.close()
                    break
    except TimeoutError:
        seen.left = True
    except (aiohttp.ClientError, ConnectionError):
        seen.broken = True
    return seen


async def _ask_half(url: str, request: Ask) -> ReceivedAnswer:
    """Hang up before the request's body is sent."""
    address, body = urlsplit(url), request.body()
    head = [f"POST {request.dialect.path} HTTP/1.1", f"host: {address.netloc}", f"content-length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in request.headers.items()]
    with contextlib.suppress(ConnectionError):
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write("\r\n".join([*head, "", ""]).encode() + body[: request.patience_bytes])
        await writer.drain()
        await asyncio.sleep(request.patience_s)
        writer.transport.abort()
    return ReceivedAnswer(request, left=True)


def wrong_with(seen: ReceivedAnswer) -> str | None:
    """Return what the app should not have seen; None where all is right.

    For an app that left, only the text is checked.
    """
    try:
        text = seen.text()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no answer: {type(error).__name__}: {error}"
    plan, status = seen.ask.plan, seen.status
    if not seen.ask.refused and not plan.text.startswith(text):
        return f"{text[:80]!r} is not the model's text"
    if seen.left:
        return None
    if seen.ask.refused:
        due = 404 if seen.ask.refused == "model" else 400
        return None if status == due and _is_error(seen) else f"{due} was due, came {status}"
    if plan.fate in HARMLESS:
        ended = status == 200 and seen.whole and (not plan.streamed or seen.ask.dialect.end in seen.body)
        same = text == plan.text or (plan.fate is Fate.NO_CHOICES and not plan.streamed)
        return None if ended and same else f"a whole answer was due, came {status}, whole: {seen.whole and ended}"
    # vLLM's 404 means that it has lost the adapter, and the proxy loads it again.
    if plan.fate in STATUSES and plan.fate is not Fate.STATUS_404:
        due = STATUSES[plan.fate]
        return None if status == due and _is_error(seen) else f"vLLM's {due} was due, came {status}"
    if status == 503:
        is_right = _is_error(seen) and "retry-after" in seen.headers
        return None if is_right else "a 503 without Retry-After or without an error's shape"
    if plan.fate is Fate.ERROR_EVENT:
        is_right = status == 200 and seen.whole and b'"error"' in seen.body
        return None if is_right else f"an error event was due, came {status}, whole: {seen.whole}"
    broke_off = plan.streamed and plan.opened and status == 200 and seen.broken
    return None if broke_off else f"503 or an answer that breaks off was due, came {status}, whole: {seen.whole}"


def _is_error(seen: ReceivedAnswer) -> bool:
    """Return whether it is a whole error, in the shape of the dialect."""
    due = {"message", "type"} if seen.ask.dialect.path == MESSAGES else {"message", "type", "code", "param"}
    try:
        error = json.loads(seen.body)["error"]
        return bool(error["message"]) and due <= error.keys() and seen.whole
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
