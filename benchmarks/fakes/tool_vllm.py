"""A model server that calls tools by rule, so that a conversation with any client runs the same way each time.

It speaks vLLM's chat with token ids and logprobs; its tokens are words. Of messages and responses that the proxy does
not turn into chat it gives vLLM's own answers, which have neither: the proxy's translation of the chat's answer.
"""

import asyncio
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.fakes.wire import (
    CHAT,
    DONE,
    END,
    MAX_MODEL_LEN,
    STREAM_HEAD,
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
from proxy.domain.chat_rules import ChatRules
from proxy.wire.anthropic import answer as message_answer
from proxy.wire.anthropic.request import translate
from proxy.wire.responses import answer as response_answer
from proxy.wire.responses.stream import ResponseEvents

MESSAGES, RESPONSES, COUNT, TOKENIZE = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens", "/tokenize"
RULES = ChatRules(merges_system=False, disabled_effort="none", ignores_empty_tools=True)
"""How it makes a chat of Anthropic messages. The proxy finds that out by asking for prompts."""
END_OF_TURN = "<|end|>"
LOGPROB = -0.125
MOST_ANSWERS = 20
"""How often a rule decides in one run: an agent whose tool fails would call it for ever."""
VOCABULARY = 150_000
_WORD = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    tool: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The call as it is sampled."""
        return tool_call_text(self.tool, to_json(self.arguments).decode())


@dataclass(frozen=True)
class Rule:
    """An answer, and the requests that get it: those with a text in them and without another."""

    answer: str | ToolCall
    needs: str = ""
    lacks: str | None = None

    def fits(self, request: str, tools: Sequence[str]) -> bool:
        """Return whether a request gets this answer. A tool is only called where it is offered."""
        offered = not isinstance(self.answer, ToolCall) or self.answer.tool in tools
        return offered and self.needs in request and (self.lacks is None or self.lacks not in request)


class ToolVllm(WireServer):
    """The server. The first of its rules that fits decides; `sampled` counts its tokens."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.begin(())

    def begin(self, rules: Sequence[Rule]) -> None:
        """Answer by these rules from now on, and count tokens from 0."""
        self._rules, self._answers, self.sampled = rules, Counter[int](), 0

    async def answer(self, call: Call, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await write(writer, self._answer_to(call))
        return True

    def _answer_to(self, call: Call) -> bytes:
        if call.body.get("model") not in self.names:
            return whole(404, error(f"The model `{call.body.get('model')}` does not exist.", 404))
        if call.path == COUNT:
            return whole(200, to_json({"input_tokens": len(prompt_ids(chat_of(call.body)))}))
        if call.path == TOKENIZE and "messages" in call.body:
            return whole(200, to_json({"tokens": prompt_ids(call.body)}))
        if call.path not in (CHAT, MESSAGES, RESPONSES):
            return whole(404, b'{"detail":"Not Found"}')
        if refusal := refusal_of(call.body):
            return whole(*refusal)
        request, tools = to_json(call.body).decode(), tools_of(call.body)
        reply = self._reply(request, tools)
        text = reply if isinstance(reply, str) else reply.text
        tokens = [*map(_token, words(text)), Token(_id(END_OF_TURN), "", LOGPROB)]
        self.sampled += len(tokens)
        if call.path != CHAT:
            return _native(call, reply, tokens)
        answer = answer_of(call, prompt_ids(call.body), reply, tokens)
        if call.streamed:
            return STREAM_HEAD + chunk(b"".join([*answer.events(), DONE])) + END
        return whole(200, to_json(answer.fields()))

    def _reply(self, request: str, tools: Sequence[str]) -> str | ToolCall:
        for rule in self._rules:
            if rule.fits(request, tools) and self._answers[id(rule)] < MOST_ANSWERS:
                self._answers[id(rule)] += 1
                return rule.answer
        return "I do not know."


class ToolCallAnswer(Answer):
    """The answer to a chat that is one tool call, as vLLM's parser reports it."""

    def __init__(self, call: Call, prompt_ids: list[int], tokens: Sequence[Token], reply: ToolCall) -> None:
        super().__init__(call, prompt_ids, tokens)
        self._id = {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function"}
        self._name, self._arguments = {"name": reply.tool}, {"arguments": to_json(reply.arguments).decode()}

    def fields(self) -> dict[str, Any]:
        fields = super().fields()
        message = {"role": "assistant", "content": None, "refusal": None}
        message["tool_calls"] = [self._id | {"function": self._name | self._arguments}]
        fields["choices"][0] |= {"message": message, "finish_reason": "tool_calls"}
        return fields

    def events(self) -> list[bytes]:
        *most, last = self._tokens
        half = len(most) // 2
        name = {"tool_calls": [self._id | {"index": 0, "function": self._name | {"arguments": ""}}]}
        arguments = {"tool_calls": [{"index": 0, "function": self._arguments}]}
        events = [self.event([], opening=True)]
        for delta, tokens, ends in (
            (name, most[:half], None),
            (arguments, most[half:], None),
            ({}, [last], "tool_calls"),
        ):
            events.append(self.chunk([self._choice({"delta": delta}, 0, tokens, ends)], {}))
        return [*events, self.chunk([], {"usage": self._usage})] if self._usage_at_end else events


def answer_of(call: Call, prompt: list[int], reply: str | ToolCall, tokens: list[Token]) -> Answer:
    """Return the answer to a chat."""
    if isinstance(reply, ToolCall):
        return ToolCallAnswer(call, prompt, tokens, reply)
    return Answer(call, prompt, tokens)


def _native(call: Call, reply: str | ToolCall, tokens: list[Token]) -> bytes:
    """Return the answer to messages or responses: that of a chat, without ids, in their dialect."""
    values = {"model": call.body["model"]}
    chat = Call(CHAT, call.request_id, values | {"stream_options": {"include_usage": True}}, call.streamed)
    answer = answer_of(chat, [1], reply, tokens)
    in_messages = call.path == MESSAGES
    if not call.streamed:
        fields = answer.fields()
        if in_messages:
            return whole(200, to_json(message_answer.answer_of(fields)))
        return whole(200, to_json(response_answer.answer_of(fields, values, MAX_MODEL_LEN)))
    back = message_answer.MessageEvents() if in_messages else ResponseEvents(values, MAX_MODEL_LEN)
    events = [back.feed(msgspec.json.decode(event.removeprefix(b"data: "))) for event in answer.events()]
    return STREAM_HEAD + chunk(b"".join([*events, back.end()])) + END


def refusal_of(body: dict[str, Any]) -> tuple[int, bytes] | None:
    """Return status and error for what vLLM alone cannot answer, as it keeps nothing; None for all else."""
    if previous := body.get("previous_response_id"):
        return 404, error(f"Response with id '{previous}' not found.", 404)
    items = body.get("input")
    if isinstance(items, list) and any(item.get("type") == "item_reference" for item in items):
        return 400, error("Unknown type of an input item: 'item_reference'", 400)
    return None


def tools_of(body: dict[str, Any]) -> list[str]:
    """Return the names of the tools that a request of any dialect offers."""
    tools = body.get("tools")
    if not isinstance(tools, list) or body.get("tool_choice") == "none":
        return []
    named = [tool.get("function", tool) for tool in tools]
    return [tool["name"] for tool in named if isinstance(tool.get("name"), str)]


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat that this server makes of Anthropic messages whose tokens are to be counted."""
    translation = translate(body | {"max_tokens": 1}, RULES)
    return body if translation is None else translation.chat


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """Return the ids of a chat's prompt: its tools, its messages, and the beginning of the answer."""
    pieces = words(to_json(body["tools"]).decode()) if body.get("tools") else []
    for message in body["messages"]:
        pieces += [f"<|{message['role']}|>", *words(_text_of(message.get("content")))]
        for call in message.get("tool_calls") or ():
            # Templates write arguments their own way; what is no JSON they write as it is.
            pieces += words(tool_call_text(call["function"]["name"], _rewritten(call["function"]["arguments"])))
        pieces.append(END_OF_TURN)
    return [_id(piece) for piece in [*pieces, "<|assistant|>"]]


def tool_call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _rewritten(arguments: str) -> str:
    try:
        return to_json(msgspec.json.decode(arguments)).decode()
    except msgspec.DecodeError:
        return arguments


def _token(word: str) -> Token:
    return Token(_id(word), word, LOGPROB)


def _id(word: str) -> int:
    return zlib.crc32(word.encode()) % VOCABULARY
