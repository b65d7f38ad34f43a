"""A model server that answers at once: vLLM's wire (0.32) for chats and texts, capture on, always three tokens.

For measurements of the proxy alone.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

WORDS = ("Hel", "lo", "!")
LOGPROBS = (-0.5, -0.25, -0.125)
PROMPT_IDS, ANSWER_IDS = [1, 2, 3], [7, 8, 9]
MAX_MODEL_LEN = 40_960
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ON_PURPOSE = "this answer fails on purpose"

_read = msgspec.json.Decoder(dict[str, Any]).decode
_json = msgspec.json.Encoder().encode


class Instant:
    """The server. `start` returns its address."""

    def __init__(self, names: tuple[str, ...], *, fails_every: int = 0, on_call: Callable[[str], None] | None = None):
        """`names`: of its base model. `fails_every`: one in so many calls gets 500. `on_call` gets each answered call's
        id.
        """
        self._names, self._fails_every, self._on_call = names, fails_every, on_call
        self._calls = 0

    async def start(self) -> str:
        """Listen on a free port of loopback."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self.answer), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def answer(self, method: str, path: str, request_id: str, data: bytes) -> bytes:
        """Return the whole answer to a request, including its head."""
        if method == "GET":
            models = [{"id": name, "object": "model", "max_model_len": MAX_MODEL_LEN} for name in self._names]
            responses = {"/v1/models": {"object": "list", "data": models}, "/is_sleeping": {"is_sleeping": False}}
            return _whole(200, _json(responses[path]) if path in responses else b"")
        body = _read(data)
        if body.get("model") not in self._names:
            return _whole(404, _error(f"The model `{body.get('model')}` does not exist.", 404))
        if path not in (CHAT, TEXT):
            return _whole(200, _json({"object": "list", "model": body["model"], "data": [], "usage": {}}))
        self._calls += 1
        if self._fails_every and self._calls % self._fails_every == 0:
            return _whole(500, _error(ON_PURPOSE, 500))
        if self._on_call is not None:
            self._on_call(request_id)
        return _call(path == CHAT, body, request_id)


class _Connection(asyncio.Protocol):
    def __init__(self, answer: Callable[[str, str, str, bytes], bytes]) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._request_id, self._body = b"", "", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._transport.write(self._answer(method, self._url.decode(), self._request_id, self._body))


def _call(chat: bool, body: dict[str, Any], request_id: str) -> bytes:
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    wanted = body.get("n")
    choices = several * (wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 1)
    top = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", "created": 1, "model": body["model"]}
    if body.get("stream") is True:
        events = b"".join(_events(chat, top, choices))
        return _STREAM + b"%x\r\n" % len(events) + events + b"\r\n0\r\n\r\n"
    answers = [_choice(chat, index, "message", WORDS, LOGPROBS, ANSWER_IDS, "stop") for index in range(choices)]
    usage = {"prompt_tokens": 3, "completion_tokens": 3 * choices, "total_tokens": 3 + 3 * choices}
    fields = {**top, "object": "chat.completion" if chat else "text_completion", "choices": answers, "usage": usage}
    if chat:
        fields["prompt_token_ids"] = PROMPT_IDS
    return _whole(200, _json(fields))


def _events(chat: bool, top: dict[str, Any], choices: int) -> list[bytes]:
    top = {**top, "object": "chat.completion.chunk" if chat else "text_completion"}
    events = []
    for index in range(choices):
        first = _choice(chat, index, "delta", (), (), [], None)
        events.append({**top, "choices": [first], **({"prompt_token_ids": PROMPT_IDS} if chat else {})})
        for place in range(3):
            part = slice(place, place + 1)
            why = "stop" if place == 2 else None
            choice = _choice(chat, index, "delta", WORDS[part], LOGPROBS[part], ANSWER_IDS[part], why)
            events.append({**top, "choices": [choice]})
    return [*(b"data: " + _json(event) + b"\n\n" for event in events), b"data: [DONE]\n\n"]


def _choice(
    chat: bool,
    index: int,
    text_field: str,
    words: tuple[str, ...],
    logprobs: tuple[float, ...],
    ids: list[int],
    why: str | None,
) -> dict[str, Any]:
    logprobs_field: dict[str, Any] | None = None
    pairs = list(zip(words, logprobs, strict=True))
    if chat:
        content = [{"token": word, "logprob": value, "bytes": [], "top_logprobs": []} for word, value in pairs]
        logprobs_field = {"content": content} if pairs else None
        fields: dict[str, Any] = {text_field: {"role": "assistant", "content": "".join(words)}}
    else:
        if pairs:
            logprobs_field = {
                "text_offset": [0] * len(pairs),
                "token_logprobs": list(logprobs),
                "tokens": list(words),
                "top_logprobs": [dict([pair]) for pair in pairs],
            }
        opening = text_field == "message" or not words
        fields = {"text": "".join(words), "prompt_token_ids": PROMPT_IDS if opening else None}
    return {"index": index, **fields, "logprobs": logprobs_field, "finish_reason": why, "token_ids": ids or None}


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _whole(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} Said\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _error(message: str, code: int) -> bytes:
    return _json({"error": {"message": message, "type": "Instant", "param": None, "code": code}})
