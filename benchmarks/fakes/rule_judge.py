"""An OpenAI-compatible judge whose scores come from a rule that reads only what RULER sends it."""

import random
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer

JudgeRule = Callable[[list[dict[str, Any]], random.Random], str]
"""A request's messages and a source of noise -> the answer, JSON as RULER reads it."""


class RuleJudge(Server):
    """Judges by the rule at `url`, until its `with` ends."""

    def __init__(self, rule: JudgeRule, seed: int) -> None:
        """`seed`: of the noise."""
        self.rule, self._random, self._lock = rule, random.Random(seed), threading.Lock()
        super().__init__(_Handler, base="/v1")

    def rng(self) -> random.Random:
        """Return the noise of one request."""
        with self._lock:
            return random.Random(self._random.random())


class _Handler(Handler):
    server: RuleJudge

    def respond(self, body: dict[str, Any]) -> None:
        text = self.server.rule(body["messages"], self.server.rng())
        self.whole(200, chat_answer(text, body["model"]))
