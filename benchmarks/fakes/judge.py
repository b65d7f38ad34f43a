"""An OpenAI-compatible judge that computes the worth of every attempt, and answers wrongly on request.

It reads the prompt only by its tags. An attempt's worth is written in it (`worth 0.3`) or, for any other text, follows
from its last message.
"""

import hashlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.fakes.json_server import Handler, Server

ATTEMPT = re.compile(r'<attempt id="(\w+)">\n(.*?)\n</attempt>', re.DOTALL)
WORTH = re.compile(r"worth ([01]\.\d+)")

Fault = Callable[[int, random.Random], str | None]
"""Number of the call, from 0 -> its fault, one of FAULTS; None: no fault."""


def worth(message: dict[str, Any]) -> float:
    """Return the worth of an attempt that ends with this message: 0 to 1, in thousandths."""
    text = str(message.get("content"))
    if matches := WORTH.findall(text):
        return float(matches[-1])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest()) % 1001 / 1000


def attempts(prompt: str) -> dict[str, list[dict[str, Any]]]:
    """Return id -> messages of a judge's prompt."""
    return {name: [json.loads(line) for line in lines.splitlines()] for name, lines in ATTEMPT.findall(prompt)}


def _items(scores: dict[str, float]) -> list[dict[str, Any]]:
    return [{"id": name, "explanation": f"worth {score}", "score": score} for name, score in scores.items()]


def _shuffled(scores: dict[str, float], rng: random.Random) -> str:
    items = _items(scores)
    rng.shuffle(items)
    return json.dumps({"scores": items})


def _short(scores: dict[str, float], _rng: random.Random) -> str:
    return json.dumps({"scores": _items(scores)[:-1]})


def _duplicated(scores: dict[str, float], _rng: random.Random) -> str:
    items = _items(scores)
    return json.dumps({"scores": [*items, items[0] | {"score": 1.0}]})


def _renamed(scores: dict[str, float], _rng: random.Random) -> str:
    items = _items(scores)
    return json.dumps({"scores": [items[0] | {"id": "zzzzzz"}, *items[1:]]})


def _taken_twice(scores: dict[str, float], _rng: random.Random) -> str:
    items = _items(scores)
    return json.dumps({"scores": [items[-1] | {"score": 0.5}, *items[1:]]})


def _out_of_range(scores: dict[str, float], rng: random.Random) -> str:
    items = _items(scores)
    items[0]["score"] = rng.choice([7, -3, 1.0001, -0.0001, 1e308])
    return json.dumps({"scores": items})


def _no_number(scores: dict[str, float], rng: random.Random) -> str:
    items = _items(scores)
    items[0]["score"] = rng.choice([None, "0.5", True, [0.5], float("nan")])
    return json.dumps({"scores": items})


def _not_json(scores: dict[str, float], rng: random.Random) -> str:
    whole = json.dumps({"scores": _items(scores)})
    return rng.choice(
        ["I would say they are all good.", "", whole[:-7], f"Here you are: {whole}", "[0.5, 0.5]", "null"]
    )


WRONG = {
    "short": _short,
    "duplicated": _duplicated,
    "renamed": _renamed,
    "taken twice": _taken_twice,
    "out of range": _out_of_range,
    "no number": _no_number,
    "not JSON": _not_json,
}
"""Answers that must be refused."""
HTTP = {"overloaded": 503, "broken": 500, "limited": 429}
FAULTS = (*WRONG, *HTTP, "slow", "cut")


class ScriptedJudge(Server):
    """Answers at `url`. Right answers come in any order, which is right too."""

    def __init__(self, fault: Fault = lambda _number, _rng: None, slow_s: float = 5.0, seed: int = 0) -> None:
        self.fault, self.slow_s = fault, slow_s
        self.rng = random.Random(seed)
        self.prompts: list[str] = []
        """The user's message of each call."""
        self.noise: Callable[[int, str], float] = lambda _number, _text: 0.0
        """Noise that is added to the score of an attempt that ends with this text, in the call of this number."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        super().__init__(_Handler)
        self.url += "/v1"

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.prompts)

    def record_call(self, prompt: str) -> tuple[int, str | None, random.Random]:
        """Record a call; return its number, its fault, and a random generator."""
        with self._lock:
            self.prompts.append(prompt)
            number = next(self._numbers)
            return number, self.fault(number, self.rng), random.Random(self.rng.random())


class _Handler(Handler):
    server: ScriptedJudge

    def respond(self, body: dict[str, Any]) -> None:
        prompt = body["messages"][-1]["content"]
        number, fault, rng = self.server.record_call(prompt)
        scores = {}
        for name, lines in attempts(prompt).items():
            noise = self.server.noise(number, str(lines[-1].get("content")))
            scores[name] = min(1.0, max(0.0, worth(lines[-1]) + noise))
        if fault == "slow":
            time.sleep(self.server.slow_s)
        if fault in HTTP:
            self.whole(HTTP[fault], {"error": {"message": fault, "type": "server_error", "code": None}})
            return
        text = WRONG.get(fault or "", _shuffled)(scores, rng)
        message = {"role": "assistant", "content": text}
        answer = {
            "id": "chatcmpl-judge",
            "object": "chat.completion",
            "created": 0,
            "model": f"{body['model']}-2026-01-01",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(text) // 4, "total_tokens": 1},
        }
        self.whole(200, answer, sent=0.5 if fault == "cut" else 1.0)
