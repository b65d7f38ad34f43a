"""A model server that costs as little as possible: vLLM's wire for chats, with all answers prepared in advance.

The answer depends on the first word of the prompt (`KINDS`), on `stream`, and on whether ids are requested: like vLLM,
it sends ids and logprobs only then (vLLM's wire 0.32).
"""

import argparse
import asyncio
import gc
import re
from typing import Any

import httptools
import uvloop

from benchmarks.fakes import wire

NAMES = ("bench", "bench@v0", "other@v0")
"""Names of its one model: as apps request it, and as the proxy does."""
KINDS = ("plain", "large", "stream", "first", "paced", "silent")
"""An answer of 1.6 KB; one of 27 KB with capture; 64 events at once; the first at once and the rest 2 ms later; one
every 10 ms; the first and then nothing, until the client leaves.
"""
EVENTS = 64
EVERY_S = 0.01
"""Time between two events of a paced stream."""
REST_S = 0.002
PROMPT_TOKENS, PLAIN_TOKENS, LARGE_TOKENS = 32, 3, 256
PLAIN_TEXT = "A text that says little. " * 50
WORD = " word"
TALLY = "/bench"
"""The route that returns the counts."""

_kind = re.compile(rb'"content":\s*"(' + "|".join(KINDS).encode() + rb") ").search
_streams = re.compile(rb'"stream":\s*true').search
_wants_ids = re.compile(rb'"return_token_ids":\s*true').search
_PROMPT_IDS = list(range(100, 100 + PROMPT_TOKENS))
_TOP = {"id": "chatcmpl-bench", "created": 1_700_000_000, "model": "bench@v0"}


def text_of(kind: str) -> str:
    """Return the text of an answer, the same with and without streaming."""
    return PLAIN_TEXT if kind == "plain" else WORD * {"large": LARGE_TOKENS, "silent": 1}.get(kind, EVENTS)


def whole(kind: str, captured: bool) -> bytes:
    """Return the body of an answer that is not streamed."""
    tokens = LARGE_TOKENS if kind == "large" else PLAIN_TOKENS
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text_of(kind)},
        "logprobs": _logprobs(tokens) if captured else None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(range(1000, 1000 + tokens)) if captured else None,
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    answer = {"object": "chat.completion", "choices": [choice], "usage": usage}
    return wire.to_json(_TOP | answer | {"prompt_token_ids": _PROMPT_IDS if captured else None})


def events(captured: bool) -> list[bytes]:
    """Return a streamed answer, one token per event, including `[DONE]`."""
    return [*(_event(place, captured) for place in range(EVENTS)), wire.DONE]


def _event(place: int, captured: bool) -> bytes:
    choice = {
        "index": 0,
        "delta": {"content": WORD} if place else {"role": "assistant", "content": WORD},
        "logprobs": _logprobs(1) if captured else None,
        "finish_reason": "stop" if place == EVENTS - 1 else None,
        "token_ids": [1000 + place] if captured else None,
    }
    opening = {} if place else {"prompt_token_ids": _PROMPT_IDS if captured else None}
    return wire.event({**_TOP, "object": "chat.completion.chunk", "choices": [choice], **opening})


def _logprobs(tokens: int) -> dict[str, Any]:
    one = {"token": WORD, "logprob": -0.6931471824645996, "bytes": list(WORD.encode()), "top_logprobs": []}
    return {"content": [one] * tokens}


_CHUNKS = {captured: [*map(wire.chunk, events(captured))] for captured in (False, True)}
_BEGINS = {captured: wire.STREAM_HEAD + chunks[0] for captured, chunks in _CHUNKS.items()}
_ENDS = {captured: b"".join(chunks[1:]) + wire.END for captured, chunks in _CHUNKS.items()}
_WHOLE = {(kind, captured): wire.whole(200, whole(kind, captured)) for kind in KINDS[:2] for captured in (False, True)}
_RESPONSES = {
    b"/v1/models": wire.whole(200, wire.models(NAMES)),
    b"/is_sleeping": wire.whole(200, b'{"is_sleeping":false}'),
}
_EMPTY = wire.whole(200, b"")


class Upstream:
    """What all connections share: the counts, and the paced streams."""

    def __init__(self) -> None:
        self.accepted = self.requests = self.open_streams = 0
        self._slots: list[dict[Connection, tuple[list[bytes], int]]] = [{} for _ in range(round(EVERY_S * 1000))]
        self._ticking = False

    def tally(self) -> bytes:
        """Return the counts since the start; `open_streams` are those that are silent now."""
        counts = {"accepted": self.accepted, "requests": self.requests, "open_streams": self.open_streams}
        return wire.whole(200, wire.to_json(counts))

    def pace(self, connection: "Connection", captured: bool) -> None:
        """Send the rest of a stream, an event every EVERY_S from now on."""
        if not self._ticking:
            self._ticking = True
            self._now_ms = int(asyncio.get_running_loop().time() * 1000)
            asyncio.get_running_loop().call_later(0.001, self._tick)
        self._slots[self._now_ms % len(self._slots)][connection] = (_CHUNKS[captured], 1)

    def _tick(self) -> None:
        """Every millisecond, while there is a paced stream: send what is due, including earlier milliseconds."""
        loop = asyncio.get_running_loop()
        until_ms = int(loop.time() * 1000)
        while self._now_ms < until_ms:
            self._now_ms += 1
            slot = self._slots[self._now_ms % len(self._slots)]
            for connection, (chunks, place) in list(slot.items()):
                last = place + 1 == len(chunks)
                if connection.gone or last:
                    del slot[connection]
                else:
                    slot[connection] = (chunks, place + 1)
                if not connection.gone:
                    connection.write(chunks[place] + wire.END if last else chunks[place])
        self._ticking = any(self._slots)
        if self._ticking:
            loop.call_later(0.001, self._tick)


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._silent = self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._upstream.accepted += 1
        self.write = transport.write  # type: ignore[attr-defined]

    def connection_lost(self, _error: Exception | None) -> None:
        self.gone = True
        self._upstream.open_streams -= self._silent

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._parser.get_method() == b"GET":
            self.write(self._upstream.tally() if self._url == TALLY.encode() else _RESPONSES.get(self._url, _EMPTY))
            return
        self._upstream.requests += 1
        captured = _wants_ids(body) is not None
        match = _kind(body)
        kind = match[1].decode() if match else "stream" if _streams(body) else "plain"
        if kind in ("plain", "large"):
            self.write(_WHOLE[kind, captured])
        elif kind == "stream":
            self.write(_BEGINS[captured] + _ENDS[captured])
        else:
            self.write(_BEGINS[captured])
            if kind == "first":
                asyncio.get_running_loop().call_later(REST_S, self._rest, captured)
            elif kind == "paced":
                self._upstream.pace(self, captured)
            else:
                self._silent = True
                self._upstream.open_streams += 1

    def _rest(self, captured: bool) -> None:
        if not self.gone:
            self.write(_ENDS[captured])


async def serve(port: int) -> None:
    """Answer on loopback until the process ends."""
    upstream = Upstream()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(upstream), "127.0.0.1", port, backlog=4096
    )
    gc.freeze()
    gc.disable()
    async with server:
        await server.serve_forever()


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
