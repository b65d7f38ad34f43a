"""Find out a vLLM server's `ChatRules` by asking it: no route says them.

`/v1/messages/count_tokens` counts the tokens of the prompt that `/v1/messages` would make; `/tokenize` returns the
prompt of a chat. The rule whose chat has that count is the server's. Nothing is generated.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from proxy.domain.chat_rules import ChatRules
from proxy.upstream.server import Upstream

T = TypeVar("T")

EFFORTS = ("none", "low", "medium", "high", "xhigh", "max")
"""What vLLM can make of thinking `disabled`: `AnthropicDisabledThinkingEffort` of 0.32."""

_SYSTEM, _REMINDER = "Answer in one word.", "The file has changed."
_HELLO = {"role": "user", "content": "Hello"}
# With an answer between them, as some chat templates refuse two messages of the user in a row.
_BEFORE: list[dict[str, Any]] = [_HELLO, {"role": "assistant", "content": "Hi"}]
_LAST = {"role": "user", "content": "Go on"}
_INLINE = {"role": "system", "content": _REMINDER}


class _Count(msgspec.Struct):
    input_tokens: int


class _Prompt(msgspec.Struct):
    tokens: list[int]


_read_count = msgspec.json.Decoder(_Count).decode
_read_prompt = msgspec.json.Decoder(_Prompt).decode


async def probe_chat_rules(upstream: Upstream, model: str) -> ChatRules:
    """Return the rules of a server; `model` is a name that it serves.

    Raises:
        UpstreamDown: it does not answer.
    """
    server = _Server(upstream, model)
    if await server.prompt([_HELLO]) is None:
        return ChatRules()
    return ChatRules(await _merges_system(server), await _disabled_effort(server), await _ignores_empty_tools(server))


class _Server:
    """The two routes. A request that the server refuses has no prompt."""

    def __init__(self, upstream: Upstream, model: str) -> None:
        self._upstream, self._model = upstream, model

    async def count(self, messages: Sequence[dict[str, Any]], **fields: Any) -> int | None:
        """Return how many tokens the prompt of an Anthropic request has."""
        answer = await self._ask("/v1/messages/count_tokens", _read_count, messages, fields)
        return None if answer is None else answer.input_tokens

    async def prompt(self, messages: Sequence[dict[str, Any]], **fields: Any) -> list[int] | None:
        """Return the token ids of a chat's prompt."""
        answer = await self._ask("/tokenize", _read_prompt, messages, fields)
        return None if answer is None else answer.tokens

    async def _ask(
        self, path: str, read: Callable[[bytes], T], messages: Sequence[dict[str, Any]], fields: dict[str, Any]
    ) -> T | None:
        body = {"model": self._model, "messages": messages, **fields}
        status, answer = await self._upstream.control("POST", path, body)
        try:
            return read(answer) if status == 200 else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


async def _merges_system(server: _Server) -> bool | None:
    """Find out `merges_system`: vLLM's `_should_merge_inline_system`."""
    count = await server.count([*_BEFORE, _INLINE, _LAST], system=_SYSTEM)
    if count is None:
        return None
    merges = count == await server.count([*_BEFORE, _LAST], system=_SYSTEM + _REMINDER)
    in_place = await server.prompt([{"role": "system", "content": _SYSTEM}, *_BEFORE, _INLINE, _LAST])
    stays = in_place is not None and count == len(in_place)
    return merges if merges != stays else None


async def _disabled_effort(server: _Server) -> str | None:
    """Find out `disabled_effort`: vLLM's `--anthropic-disabled-thinking-effort`, which it chooses itself by default
    (`_probe_disabled_thinking_effort`): `none`, or `low` if the template refuses or ignores `none`."""
    count = await server.count([_HELLO], thinking={"type": "disabled"})
    fitting: dict[str, list[int]] = {}
    for effort in EFFORTS:
        # As a chat's `reasoning_effort` reaches its template: `ChatCompletionRequest.build_chat_params`.
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        prompt = await server.prompt([_HELLO], chat_template_kwargs=variables)
        if prompt is not None and len(prompt) == count:
            fitting[effort] = prompt
    if not fitting:
        return None
    likely = "low" if "low" in fitting else next(iter(fitting))
    # Of two prompts of the same length, the count does not say which it is.
    return likely if all(prompt == fitting[likely] for prompt in fitting.values()) else None


async def _ignores_empty_tools(server: _Server) -> bool:
    """Find out `ignores_empty_tools`. A template may tell an empty list from none, and a server without a tool parser
    refuses it."""
    turns = [*_BEFORE, _LAST]
    count, prompt = await server.count(turns), await server.prompt(turns)
    if count is None or prompt is None:
        return False
    return count == await server.count(turns, tools=[]) and prompt == await server.prompt(turns, tools=[])
