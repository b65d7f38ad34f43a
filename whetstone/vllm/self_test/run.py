"""Run the self-test of a model server: which requests are sent, in which order, and for how long.

About fifteen short requests, one after the other; on the starter under two seconds. None of them can harm the engine:
no prompt logprobs, no echo, no existing adapter. A request that fails fails its check, never the test.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec

from whetstone.vllm.client import Vllm, VllmDown, VllmError, VllmRefused
from whetstone.vllm.self_test import checks, questions
from whetstone.vllm.self_test.answers import Answer, read
from whetstone.vllm.self_test.questions import Check, Question

LIMIT_S = 30.0
"""Long enough for a large model on a slow machine to answer what training needs; that is tested first."""
CAPTURE = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
"""What the proxy adds to a request."""
ALTERNATIVES = {**CAPTURE, "top_logprobs": 20, "return_tokens_as_token_ids": True, "max_tokens": 1, "seed": 1}
"""One token and its most likely alternatives; 20 is vLLM's default limit."""
NEUTRAL = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
HOT = 2.0
"""A temperature that spreads the probability, so that a cut by top_p or top_k becomes visible."""
TOOL = "look_up"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Look a word up in the dictionary.",
            # Strict, and a single allowed word: once the model begins a call, vLLM's grammar completes it. A call that
            # is not JSON would cause an error with a traceback in vLLM's log.
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "enum": ["whetstone"]}},
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }
]
GREETING = [{"role": "user", "content": "Hello!"}]
"""The most likely answer begins as the prompt does: a repetition penalty changes it."""
ERRAND = [{"role": "user", "content": "Look up the word whetstone with the tool."}]
TOOL_TOKENS = 192
"""Room for some reasoning before a call."""
SHOWN_CHARACTERS = 300
"""Most characters of an error that are shown."""


class SelfTest(msgspec.Struct, frozen=True):
    """What a model server can do for us."""

    served: str
    """The model's name on the server."""
    vllm_version: str | None
    """None: the server does not report it."""
    tested_at: datetime
    trainable: bool
    """Token ids came, and no check that training needs has failed."""
    checks: tuple[Check, ...]
    address: str | None = None
    """URL of the server; None in tests that were stored before there were several servers."""

    @property
    def missing(self) -> list[Check]:
        """Failed checks that training needs."""
        return [check for check in self.checks if check.needed and check.ok is False]


def run(control: Vllm, served: str, limit_s: float = LIMIT_S) -> SelfTest:
    """Run all checks on `served`; after `limit_s` seconds the rest is unknown. Raises none of vLLM's errors."""
    talk = _Talk(control, served, time.monotonic() + limit_s)
    plain = _check(questions.PLAIN, lambda: checks.plain(talk.greeting))
    mode = _check(questions.LOGPROBS, lambda: checks.logprob_mode(talk.neutral, talk.cool))
    results = (
        plain,
        _check(questions.STREAMED, lambda: checks.streamed(talk.stream(), talk.greeting)),
        mode,
        _check(questions.DEFAULTS, lambda: checks.defaults(talk.unset_and_neutral(), mode)),
        _check(questions.ADAPTERS, lambda: checks.adapters(talk.refusal(), talk.figures())),
        _check(questions.TOOLS, lambda: checks.beside_tools(talk.errand, talk.forced)),
        _check(questions.CALL, lambda: checks.tool_call(talk.errand, talk.forced, TOOL)),
        _check(questions.REASONING, lambda: checks.reasoning(talk.greeting)),
        _check(questions.TEMPLATE, lambda: checks.template(*talk.turns())),
        _check(questions.SEEDS, lambda: checks.seeds(talk.seeded(), talk.seeded())),
    )
    trainable = plain.ok is True and not any(check.needed and check.ok is False for check in results)
    return SelfTest(served, talk.version(), datetime.now(UTC), trainable, results)


def _check(question: Question, judge: Callable[[], Check]) -> Check:
    try:
        return judge()
    except VllmRefused as error:
        return question.answer(False if question.refusal_is_no else None, str(error)[:SHOWN_CHARACTERS])
    except VllmDown as error:
        return question.answer(None, str(error)[:SHOWN_CHARACTERS])


class _Talk:
    """Sends the requests; one that several checks use is sent once."""

    def __init__(self, control: Vllm, served: str, deadline: float) -> None:
        self._control = control
        self._served = served
        self._deadline = deadline

    @cached_property
    def greeting(self) -> Answer:
        return self._chat(GREETING, temperature=0, max_tokens=32)

    def stream(self) -> Answer:
        body = self._body(GREETING, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True})
        return _read(self._control.events("/v1/chat/completions", body, self._left_s()))

    @cached_property
    def errand(self) -> Answer:
        return self._chat(ERRAND, temperature=0, max_tokens=TOOL_TOKENS, tools=TOOLS, tool_choice="auto")

    @cached_property
    def forced(self) -> Answer:
        named = {"type": "function", "function": {"name": TOOL}}
        return self._chat(ERRAND, temperature=0, max_tokens=TOOL_TOKENS, tools=TOOLS, tool_choice=named)

    def turns(self) -> tuple[Answer, Answer] | tuple[Answer, Answer, Answer, Answer]:
        """Return an answer in words and the next one; then the same for a tool call, if the model makes one."""
        greeting = self.greeting
        goodbye = [{"role": "assistant", "content": greeting.content}, {"role": "user", "content": "And goodbye."}]
        then = self._chat([*GREETING, *goodbye], temperature=0, max_tokens=1)
        try:
            calls = msgspec.to_builtins(self.errand.tool_calls)
        except VllmRefused:
            calls = []  # it accepts no tools: another check reports that
        if not calls:
            return greeting, then
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "A stone that sharpens."} for call in calls]
        call_message = {"role": "assistant", "content": self.errand.content or None, "tool_calls": calls}
        result = self._chat([*ERRAND, call_message, *results], temperature=0, max_tokens=1, tools=TOOLS)
        return greeting, then, self.errand, result

    @cached_property
    def neutral(self) -> Answer:
        return self._chat(GREETING, **ALTERNATIVES, **NEUTRAL, temperature=1)

    @cached_property
    def cool(self) -> Answer:
        return self._chat(GREETING, **ALTERNATIVES, **NEUTRAL, temperature=checks.COOL)

    def unset_and_neutral(self) -> list[tuple[Answer, Answer]]:
        unset = self._chat(GREETING, **ALTERNATIVES)
        hot_unset = self._chat(GREETING, **ALTERNATIVES, temperature=HOT)
        hot_neutral = self._chat(GREETING, **ALTERNATIVES, **NEUTRAL, temperature=HOT)
        return [(unset, self.neutral), (hot_unset, hot_neutral)]

    def seeded(self) -> Answer:
        return self._chat(GREETING, temperature=HOT, max_tokens=16, seed=7)

    def refusal(self) -> str:
        """Return why an adapter without a path is not loaded. A nonexistent path would cause an error in vLLM's log."""
        body = {"lora_name": "whetstone-self-test", "lora_path": ""}
        try:
            self._control.answer("POST", "/v1/load_lora_adapter", body, self._left_s())
        except VllmRefused as error:
            return str(error)
        return "an adapter without a path was loaded"

    def figures(self) -> str:
        """Return the server's metrics; empty if it has none."""
        try:
            return self._control.metrics(self._left_s())
        except VllmRefused:
            return ""

    def version(self) -> str | None:
        try:
            return str(self._control.answer("GET", "/version", None, self._left_s())["version"])
        except (VllmError, KeyError, TypeError):
            return None

    def _chat(self, messages: Any, **fields: Any) -> Answer:
        body = self._body(messages, **fields)
        return _read([self._control.answer("POST", "/v1/chat/completions", body, self._left_s())])

    def _body(self, messages: Any, **fields: Any) -> dict[str, Any]:
        return {"model": self._served, "messages": messages, **CAPTURE, **fields}

    def _left_s(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise VllmDown("the time for the self-test was over")
        return left


def _read(parts: list[Any]) -> Answer:
    try:
        return read(parts)
    except ValueError as error:
        raise VllmRefused(f"not the answer of a chat completion: {error}") from error
