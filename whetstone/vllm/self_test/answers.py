"""Parse the fields of vLLM's chat answers, plain or streamed, that the self-test uses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class Function(msgspec.Struct, frozen=True):
    """The function that a tool call calls."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the app sees it."""

    id: str
    function: Function
    type: str = "function"


@dataclass(frozen=True)
class Answer:
    """A chat answer, plain or streamed, reduced to the fields that the checks use."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Nats, one per token with a logprob entry; NaN for null."""
    top: dict[str, float]
    """Most likely alternatives of the first token: `token_id:<id>` -> nats."""
    prompt_tokens: int
    completion_tokens: int
    """According to the usage field."""
    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    """Only of a plain answer."""
    finish_reason: str | None


class _Top(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class _Token(msgspec.Struct, frozen=True):
    logprob: float | None = None
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_Token] | None = None


class _AnswerText(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None


class _Message(_AnswerText, frozen=True):
    tool_calls: list[ToolCall] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message = _Message()
    delta: _AnswerText = _AnswerText()
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Part(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None
    usage: _Usage | None = None


def read(parts: Sequence[Any]) -> Answer:
    """Parse an answer: the single body of a plain one, the events of a stream.

    Raises:
        ValueError: a part is not part of a chat completion.
    """
    read_parts = msgspec.convert(parts, list[_Part])
    choices = [choice for part in read_parts for choice in part.choices]
    texts: list[_AnswerText] = [text for choice in choices for text in (choice.message, choice.delta)]
    tokens = [token for choice in choices for token in (choice.logprobs and choice.logprobs.content) or []]
    usage = next((part.usage for part in reversed(read_parts) if part.usage), _Usage())
    return Answer(
        prompt_token_ids=next((part.prompt_token_ids for part in read_parts if part.prompt_token_ids), []),
        token_ids=[token_id for choice in choices for token_id in choice.token_ids or []],
        logprobs=[math.nan if token.logprob is None else token.logprob for token in tokens],
        top={top.token: top.logprob for top in tokens[0].top_logprobs} if tokens else {},
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        content="".join(text.content or "" for text in texts),
        reasoning="".join(text.reasoning or "" for text in texts),
        tool_calls=[call for choice in choices for call in choice.message.tool_calls or []],
        finish_reason=next((choice.finish_reason for choice in reversed(choices) if choice.finish_reason), None),
    )
