"""vLLM's wire (0.32, capture on) for chat and text completions: the bytes of its answers, and their server.

A model server on asyncio is a subclass of `WireServer` that decides what happens to each call.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_MODEL_LEN, CREATED = 40_960, 1_795_278_185
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
"""The last chunk of a stream."""

to_json = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(dict[str, Any]).decode


def whole(status: int, body: bytes) -> bytes:
    """Return an answer that is not streamed, including its head."""
    head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(fields: Any) -> bytes:
    return b"data: " + to_json(fields) + b"\n\n"


def error(message: str, code: int) -> bytes:
    return to_json({"error": {"message": message, "type": "Fake", "param": None, "code": code}})


def models(names: Sequence[str]) -> bytes:
    """Return the list of models: one, under these names."""
    data = [{"id": name, "object": "model", "max_model_len": MAX_MODEL_LEN} for name in names]
    return to_json({"object": "list", "data": data})


@dataclass(frozen=True)
class Token:
    """A sampled token; its logprob is in nats."""

    id: int
    word: str
    logprob: float


@dataclass(frozen=True)
class Call:
    """A request for an answer."""

    path: str
    request_id: str
    body: dict[str, Any]
    streamed: bool


class Answer:
    """The answer to a call, with the same tokens for each of its choices."""

    def __init__(self, call: Call, prompt_ids: list[int], tokens: Sequence[Token], choices: int = 1) -> None:
        self._prompt_ids, self._tokens, self._choices = prompt_ids, tokens, choices
        self._chat = call.path == CHAT
        answer_id = f"{'chatcmpl' if self._chat else 'cmpl'}-{call.request_id}"
        self._top = {
            "id": answer_id,
            "created": CREATED,
            "model": call.body["model"],
            "object": "text_completion",
        }
        options = call.body.get("stream_options")
        options = options if isinstance(options, dict) else {}  # vLLM refuses others; they ask for nothing here
        self._usage_at_end = options.get("include_usage") is True
        self._usage_in_each_event = options.get("continuous_usage_stats") is True
        prompt, sampled = len(prompt_ids), choices * len(tokens)
        self._usage = {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}

    def fields(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        text = "".join(token.word for token in self._tokens)
        content: dict[str, Any] = {"text": text, "prompt_token_ids": self._prompt_ids}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}
        choices = [self._choice(content, index, self._tokens, "stop") for index in range(self._choices)]
        fields = self._top | {"choices": choices, "usage": self._usage}
        chat = {"object": "chat.completion", "prompt_token_ids": self._prompt_ids}
        return fields | (chat if self._chat else {})

    def events(self) -> list[bytes]:
        """Return all events but [DONE]: of each choice a chat's role, or an empty text, then one per token; usage last,
        if requested.
        """
        last = len(self._tokens) - 1
        events = []
        for index in range(self._choices):
            events.append(self.event([], index, opening=True))
            for place, token in enumerate(self._tokens):
                events.append(self.event([token], index, "stop" if place == last else None))
        return [*events, self.chunk([], {"usage": self._usage})] if self._usage_at_end else events

    def event(
        self, tokens: Sequence[Token], index: int = 0, finish_reason: str | None = None, *, opening: bool = False
    ) -> bytes:
        """Return an event with these tokens of a choice."""
        text = "".join(token.word for token in tokens)
        content: dict[str, Any] = {"text": text, "prompt_token_ids": self._prompt_ids if opening else None}
        if self._chat:
            content = {"delta": {"role": "assistant", "content": ""} if opening else {"content": text} if text else {}}
        fields = {"prompt_token_ids": self._prompt_ids} if self._chat and opening else {}
        usage = {"usage": self._usage} if self._usage_in_each_event else {}
        return self.chunk([self._choice(content, index, tokens, finish_reason)], fields | usage)

    def chunk(self, choices: list[dict[str, Any]], fields: dict[str, Any]) -> bytes:
        """Return an event with these choices."""
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        return event(self._top | kind | {"choices": choices} | fields)

    def _choice(
        self, content: dict[str, Any], index: int, tokens: Sequence[Token], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._chat and tokens:
            logprobs = {
                "content": [
                    {"token": one.word, "logprob": one.logprob, "bytes": list(one.word.encode()), "top_logprobs": []}
                    for one in tokens
                ]
            }
        elif tokens:
            logprobs = {
                "text_offset": [0] * len(tokens),
                "token_logprobs": [one.logprob for one in tokens],
                "tokens": [one.word for one in tokens],
                "top_logprobs": [{one.word: one.logprob} for one in tokens],
            }
        token_ids = [one.id for one in tokens] or None
        ends = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason, "token_ids": token_ids}
        return content | ends


class WireServer:
    """A server of a model with these names, on a free port of loopback. `start` returns its address."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    async def start(self) -> str:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def answer(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a call; return whether the connection stays open."""
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side hung up, or the run is over
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection stays open."""
        request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = request.split(" ")
        if method == "GET":
            bodies = {"/v1/models": models(self.names), "/is_sleeping": b'{"is_sleeping":false}'}
            await write(writer, whole(200, bodies.get(path, b"")))
            return True
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = _read(await reader.readexactly(int(headers["content-length"])))
        call = Call(path, headers.get("x-request-id", ""), body, streamed=body.get("stream") is True)
        return await self.answer(call, reader, writer)


async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
