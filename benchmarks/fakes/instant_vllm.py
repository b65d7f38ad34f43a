"""A model server that answers at once, with the same three tokens: for measurements of the proxy alone."""

import asyncio
from collections.abc import Callable, Sequence

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

PROMPT_IDS = [1, 2, 3]
TOKENS = (Token(7, "Hel", -0.5), Token(8, "lo", -0.25), Token(9, "!", -0.125))
ON_PURPOSE = "this answer fails on purpose"


class Instant(WireServer):
    """The server."""

    def __init__(
        self, names: Sequence[str], *, fails_every: int = 0, on_call: Callable[[str], None] = lambda _id: None
    ):
        """`names`: of its base model. `fails_every`: one in so many calls gets 500. `on_call` gets each answered call's
        id.
        """
        super().__init__(names)
        self._fails_every, self._on_call, self._calls = fails_every, on_call, 0

    async def answer(self, call: Call, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await write(writer, self._answer_to(call))
        return True

    def _answer_to(self, call: Call) -> bytes:
        model = call.body.get("model")
        if model not in self.names:
            return whole(404, error(f"The model `{model}` does not exist.", 404))
        if call.path not in (CHAT, TEXT):
            return whole(200, to_json({"object": "list", "model": model, "data": [], "usage": {}}))
        self._calls += 1
        if self._fails_every and self._calls % self._fails_every == 0:
            return whole(500, error(ON_PURPOSE, 500))
        self._on_call(call.request_id)
        answer = Answer(call, PROMPT_IDS, TOKENS, _choices(call))
        if call.streamed:
            return STREAM_HEAD + chunk(b"".join([*answer.events(), DONE])) + END
        return whole(200, to_json(answer.fields()))


def _choices(call: Call) -> int:
    prompts, wanted = call.body.get("prompt"), call.body.get("n")
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return several * (wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 1)
