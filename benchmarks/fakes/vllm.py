"""A model server that fails on purpose: vLLM's wire for chat and text completions, one fate for each request.

A request contains its number in its last words (`words_of`), and `plan_of` derives its fate from seed and number: the
same for this server, which does it, and for the check afterwards. It follows vLLM's wire (0.32, capture on).
"""

import asyncio
import json
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Fate(StrEnum):
    """What happens to a request."""

    NORMAL = "normal"
    SLOW = "slow"
    SPLIT = "split anywhere by TCP"
    LONG = "very long"
    NO_CHOICES = "empty choices"
    SILENT = "silent until the proxy gives up"
    NO_ANSWER = "dies before its headers"
    DIES = "dies midway"
    TRUNCATED = "shorter than its content-length"
    GARBAGE = "garbage"
    NO_DONE = "ends without [DONE]"
    ERROR_EVENT = "an error as event"
    STATUS_400 = "400"
    STATUS_404 = "404"
    STATUS_500 = "500"
    STATUS_503 = "503"


HARMLESS = frozenset({Fate.NORMAL, Fate.SLOW, Fate.SPLIT, Fate.LONG, Fate.NO_CHOICES})
"""The app gets its answer."""
ONLY_STREAMED = frozenset({Fate.NO_DONE, Fate.ERROR_EVENT})
STATUSES = {Fate.STATUS_400: 400, Fate.STATUS_404: 404, Fate.STATUS_500: 500, Fate.STATUS_503: 503}
WEIGHTS = dict.fromkeys(Fate, 20) | {Fate.NORMAL: 500, Fate.SLOW: 100, Fate.SPLIT: 60, Fate.LONG: 10, Fate.SILENT: 4}
MOST_TOKENS = 40
LONG_TOKENS = 1000
MAX_MODEL_LEN = 40_960
SLOW_S = 0.01
"""Time between two events of a slow stream."""

WORDS = ("a", " the", "é", "漢字", "🙂", '"said"', "\n\n", "data: ", "\\", "")
"""Texts of tokens. Each id always has the same text; one text is empty, as for half of a character."""

GARBAGE = (
    b'{"choices":[{"index":0,"del',
    b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe"},"text":"\xff\xfe"}]}',
    b'{"choices":7}',
    b'{"choices":[{"index":[],"delta":{},"message":{},"text":""}]}',
    b'{"choices":[{"index":0,"delta":7,"message":7,"text":7}]}',
    b'{"choices":[{"index":0,"delta":{},"message":{},"text":"","token_ids":["x"]}]}',
    b"{\x00\x01\x02\x03}",
    b'{"choices":' + b"[" * 5000,
)
"""Sent in place of an answer or an event: no JSON, no text, or nothing that could be a completion."""


@dataclass(frozen=True)
class Plan:
    """The fate of a request, and its answer. Lengths: one word and one logprob (nats) per sampled id."""

    number: int
    streamed: bool
    fate: Fate
    prompt_ids: list[int]
    token_ids: list[int]
    cut: int
    """Tokens sent before a fault strikes; a stream's first event is sent before them."""
    opened: bool
    """Whether a stream's first event is sent before a fault strikes."""
    garbage: bytes

    @property
    def words(self) -> list[str]:
        """The texts of the tokens."""
        return [WORDS[token % len(WORDS)] for token in self.token_ids]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.words)

    @property
    def logprobs(self) -> list[float]:
        """Logprobs, exact in four bytes too."""
        return [-(token % 64) / 64 for token in self.token_ids]


@dataclass
class Arrival:
    """A request as it came, and whether its whole answer was sent."""

    request_id: str
    path: str
    plan: Plan
    answered: bool = False


def words_of(number: int) -> str:
    """Return the last words of request `number`."""
    return f"soak #{number}"


def plan_of(seed: int, number: int, streamed: bool) -> Plan:
    """Return the fate of request `number`."""
    dice = random.Random(f"{seed}/{number}/{streamed}")
    fates = [fate for fate in Fate if streamed or fate not in ONLY_STREAMED]
    fate = dice.choices(fates, [WEIGHTS[fate] for fate in fates])[0]
    tokens = LONG_TOKENS if fate is Fate.LONG else dice.randint(1, MOST_TOKENS)
    cut = dice.randint(0, tokens)
    return Plan(
        number=number,
        streamed=streamed,
        fate=fate,
        prompt_ids=[dice.randrange(150_000) for _ in range(dice.randint(4, 60))],
        token_ids=[dice.randrange(150_000) for _ in range(tokens)],
        cut=cut,
        opened=cut > 0 or dice.random() < 0.5,
        garbage=dice.choice(GARBAGE),
    )


class Faulty:
    """The server. `start` returns its address; `arrivals` records the requests."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.arrivals: list[Arrival] = []

    async def start(self) -> str:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the other side hung up
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection stays open."""
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = request.split(" ")
        if method == "GET":
            models = {"object": "list", "data": [{"id": "soak@v0", "object": "model", "max_model_len": MAX_MODEL_LEN}]}
            await _write(writer, _whole(200, _json(models) if path == "/v1/models" else b""))
            return True
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        if path not in (CHAT, TEXT):
            await _write(writer, _whole(404, b'{"detail":"Not Found"}'))
            return True
        last_words = body["messages"][-1]["content"] if path == CHAT else body["prompt"]
        plan = plan_of(self._seed, int(last_words.rpartition("#")[2]), body.get("stream") is True)
        arrival = Arrival(headers["x-request-id"], path, plan)
        self.arrivals.append(arrival)
        if plan.fate is Fate.NO_ANSWER:
            return False
        if plan.fate in STATUSES:
            await _write(writer, _whole(STATUSES[plan.fate], _error(STATUSES[plan.fate], body["model"])))
            return True
        answer = _Answer(plan, path, body["model"], arrival.request_id, body.get("stream_options") or {})
        stays = await (self._stream if plan.streamed else self._plain)(answer, reader, writer)
        arrival.answered = plan.fate in HARMLESS
        return stays

    async def _plain(self, answer: "_Answer", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        fate, data = answer.plan.fate, _whole(200, answer.answer())
        if fate is Fate.SILENT:
            await reader.read()
            return False
        if fate is Fate.GARBAGE:
            data = _whole(200, answer.plan.garbage)
        if fate in (Fate.DIES, Fate.TRUNCATED):
            await _write(writer, data[: -len(data) // 2] if fate is Fate.DIES else data[:-1])
            return False
        if fate is Fate.SLOW:
            await asyncio.sleep(10 * SLOW_S)
        await (_write_split if fate is Fate.SPLIT else _write)(writer, data)
        return True

    async def _stream(self, answer: "_Answer", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        plan = answer.plan
        events = answer.events()
        if plan.fate not in HARMLESS:
            events = events[: plan.opened + plan.cut]
        chunks = [_EVENT_STREAM, *map(_chunk, events)]
        stays = False
        match plan.fate:
            case Fate.TRUNCATED:
                chunks.append(_chunk(answer.event([plan.token_ids[0]]))[:-10])
            case Fate.NO_DONE:
                chunks.append(_END)
                stays = True
            case Fate.GARBAGE | Fate.ERROR_EVENT:
                wrong = plan.garbage if plan.fate is Fate.GARBAGE else _error(500, answer.model)
                chunks += [_chunk(b"data: " + wrong + b"\n\n"), _chunk(_DONE), _END]
                stays = True
            case fate if fate in HARMLESS:
                chunks += [_chunk(_DONE), _END]
                stays = True
        if plan.fate is Fate.SPLIT:
            await _write_split(writer, b"".join(chunks))
        else:
            for chunk in chunks:
                await _write(writer, chunk)
                await asyncio.sleep(SLOW_S if plan.fate is Fate.SLOW else 0)
        if plan.fate is Fate.SILENT:
            await reader.read()
        return stays


class _Answer:
    """The bytes of an answer, as vLLM writes them."""

    def __init__(self, plan: Plan, path: str, model: str, request_id: str, stream_options: dict[str, Any]) -> None:
        self.plan, self.model = plan, model
        self._chat = path == CHAT
        self._top = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "created": 1_795_278_185,
            "model": model,
        }
        self._usage_at_end = stream_options.get("include_usage") is True
        self._usage_in_each_event = stream_options.get("continuous_usage_stats") is True

    def answer(self) -> bytes:
        plan = self.plan
        message: dict[str, Any] = {"text": plan.text, "prompt_token_ids": plan.prompt_ids}
        if self._chat:
            message = {"message": {"role": "assistant", "content": message["text"], "refusal": None, "tool_calls": []}}
        choice = message | self._sampled(plan.token_ids, "stop")
        top = {"prompt_token_ids": plan.prompt_ids} if self._chat else {}
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [] if plan.fate is Fate.NO_CHOICES else [choice]
        return _json(self._top | {"object": kind, "choices": choices, "usage": self._usage()} | top)

    def events(self) -> list[bytes]:
        """Return all events but [DONE]: a chat's role, or an empty text; then one per token; usage if requested."""
        plan = self.plan
        first = self.event([], opening=True)
        last = len(plan.token_ids) - 1
        events = [
            self.event([token], finish_reason="stop" if place == last else None)
            for place, token in enumerate(plan.token_ids)
        ]
        if plan.fate is Fate.NO_CHOICES:
            events.insert(plan.cut, _event(self._chunk_top() | {"choices": []}))
        if self._usage_at_end:
            events.append(_event(self._chunk_top() | {"choices": [], "usage": self._usage()}))
        return [first, *events]

    def event(self, token_ids: list[int], finish_reason: str | None = None, *, opening: bool = False) -> bytes:
        text = "".join(WORDS[token % len(WORDS)] for token in token_ids)
        choice: dict[str, Any] = {"text": text, "prompt_token_ids": self.plan.prompt_ids if opening else None}
        if self._chat:
            choice = {"delta": {"role": "assistant", "content": ""} if opening else {"content": text} if text else {}}
        fields = self._chunk_top() | {"choices": [choice | self._sampled(token_ids, finish_reason)]}
        if self._chat and opening:
            fields["prompt_token_ids"] = self.plan.prompt_ids
        if self._usage_in_each_event:
            fields["usage"] = self._usage()
        return _event(fields)

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self.plan.prompt_ids), len(self.plan.token_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}

    def _chunk_top(self) -> dict[str, Any]:
        return self._top | {"object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _sampled(self, token_ids: list[int], finish_reason: str | None) -> dict[str, Any]:
        pairs = [(WORDS[token % len(WORDS)], -(token % 64) / 64) for token in token_ids]
        logprobs: dict[str, Any] | None = None
        if self._chat and pairs:
            logprobs = {
                "content": [
                    {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
                    for word, logprob in pairs
                ]
            }
        elif pairs:
            logprobs = {
                "text_offset": [0] * len(pairs),
                "token_logprobs": [logprob for _, logprob in pairs],
                "tokens": [word for word, _ in pairs],
                "top_logprobs": [dict([pair]) for pair in pairs],
            }
        return {"index": 0, "logprobs": logprobs, "finish_reason": finish_reason, "token_ids": token_ids or None}


_EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_DONE = b"data: [DONE]\n\n"
_END = b"0\r\n\r\n"


def _whole(status: int, body: bytes) -> bytes:
    return (
        f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + _json(fields) + b"\n\n"


def _error(status: int, model: str) -> bytes:
    return _json({"error": {"message": f"{model} fails on purpose", "type": "Soak", "param": None, "code": status}})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _write_split(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write in pieces that ignore the boundaries of events, characters and HTTP chunks."""
    dice = random.Random(len(data))
    start = 0
    while start < len(data):
        size = dice.randint(1, 400)
        await _write(writer, data[start : start + size])
        await asyncio.sleep(0.001)
        start += size
