"""A model server that fails on purpose: vLLM's wire for chat and text completions, one fate for each request.

A request contains its number in its last words (`words_of`), and `plan_of` derives its fate from seed and number: the
same for this server, which does it, and for the check afterwards.
"""

import asyncio
import random
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.fakes.wire import (
    CHAT,
    DONE,
    END,
    STREAM_HEAD,
    TEXT,
    Answer,
    Call,
    Token,
    WireServer,
    chunk,
    error,
    to_json,
    whole,
    write,
)


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
    def tokens(self) -> list[Token]:
        """The sampled tokens; their logprobs are exact in four bytes too."""
        return [Token(token, WORDS[token % len(WORDS)], -(token % 64) / 64) for token in self.token_ids]

    @property
    def words(self) -> list[str]:
        """The texts of the tokens."""
        return [token.word for token in self.tokens]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.words)

    @property
    def logprobs(self) -> list[float]:
        return [token.logprob for token in self.tokens]


@dataclass
class Arrival:
    """A request as it came, and whether its whole answer was sent."""

    request_id: str
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


class Faulty(WireServer):
    """The server. `arrivals` records the requests."""

    def __init__(self, seed: int) -> None:
        super().__init__(("soak@v0",))
        self._seed = seed
        self.arrivals: list[Arrival] = []

    async def answer(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if call.path not in (CHAT, TEXT):
            await write(writer, whole(404, b'{"detail":"Not Found"}'))
            return True
        last_words = call.body["messages"][-1]["content"] if call.path == CHAT else call.body["prompt"]
        plan = plan_of(self._seed, int(last_words.rpartition("#")[2]), call.streamed)
        arrival = Arrival(call.request_id, plan)
        self.arrivals.append(arrival)
        if plan.fate is Fate.NO_ANSWER:
            return False
        if status := STATUSES.get(plan.fate):
            await write(writer, whole(status, _failure(status, call)))
            return True
        stays = await (self._stream if plan.streamed else self._plain)(call, plan, writer)
        if plan.fate is Fate.SILENT:
            await reader.read()
        arrival.answered = plan.fate in HARMLESS
        return stays

    async def _plain(self, call: Call, plan: Plan, writer: asyncio.StreamWriter) -> bool:
        fate, fields = plan.fate, Answer(call, plan.prompt_ids, plan.tokens).fields()
        data = whole(200, to_json(fields | ({"choices": []} if fate is Fate.NO_CHOICES else {})))
        match fate:
            case Fate.SILENT:
                return False
            case Fate.DIES | Fate.TRUNCATED:
                await write(writer, data[: -len(data) // 2] if fate is Fate.DIES else data[:-1])
                return False
            case Fate.GARBAGE:
                data = whole(200, plan.garbage)
            case Fate.SLOW:
                await asyncio.sleep(10 * SLOW_S)
        await (_write_split if fate is Fate.SPLIT else write)(writer, data)
        return True

    async def _stream(self, call: Call, plan: Plan, writer: asyncio.StreamWriter) -> bool:
        answer, fate = Answer(call, plan.prompt_ids, plan.tokens), plan.fate
        events = answer.events()
        if fate is Fate.NO_CHOICES:
            events.insert(1 + plan.cut, answer.chunk([], {}))
        if fate not in HARMLESS:
            events = events[: plan.opened + plan.cut]
        chunks = [STREAM_HEAD, *map(chunk, events)]
        match fate:
            case Fate.TRUNCATED:
                chunks.append(chunk(answer.event(plan.tokens[:1]))[:-10])
            case Fate.NO_DONE:
                chunks.append(END)
            case Fate.GARBAGE | Fate.ERROR_EVENT:
                wrong = plan.garbage if fate is Fate.GARBAGE else _failure(500, call)
                chunks += [chunk(b"data: " + wrong + b"\n\n"), chunk(DONE), END]
            case fate if fate in HARMLESS:
                chunks += [chunk(DONE), END]
        if fate is Fate.SPLIT:
            await _write_split(writer, b"".join(chunks))
        else:
            for one in chunks:
                await write(writer, one)
                await asyncio.sleep(SLOW_S if fate is Fate.SLOW else 0)
        return chunks[-1] is END


def _failure(status: int, call: Call) -> bytes:
    return error(f"{call.body['model']} fails on purpose", status)


async def _write_split(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write in pieces that ignore the boundaries of events, characters and HTTP chunks."""
    dice = random.Random(len(data))
    start = 0
    while start < len(data):
        size = dice.randint(1, 400)
        await write(writer, data[start : start + size])
        await asyncio.sleep(0.001)
        start += size
