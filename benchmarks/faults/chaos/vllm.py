"""The model server of `chaos`: that of `benchmarks.faults.killed.vllm`, and an answer to every chat at once.

It is a process of its own: `python -m benchmarks.faults.chaos.vllm` prints its address. It has a few fixed answers,
with the logprobs of the base model, so they can be trained on.
"""

import json
import random
import threading
from typing import Any

from benchmarks.faults.killed.vllm import Server, serve
from whetstone.config.settings import Settings, load

CHAT, LOAD = "/v1/chat/completions", "/v1/load_lora_adapter"
ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 32, 12, 6, 256


class Instant(Server):
    """Answers at `url` until it is ended."""

    request_queue_size = 128

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        dice = random.Random(settings.seed)
        self._known = [self._answer(dice) for _ in range(ANSWERS)]
        self._dice = dice
        self._loading = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == LOAD:
            with self._loading:  # one after the other, as vLLM does
                return super().answer(path, body)
        if path != CHAT:
            return super().answer(path, body)
        if body["model"] not in (self._settings.served_name, *self._loaded):
            return 404, {"error": {"message": f"no {body['model']}", "type": "NotFoundError", "code": 404}}
        prompt_ids, choice = self._dice.choice(self._known)
        top = {"id": "chatcmpl-chaos", "created": 1, "model": body["model"], "prompt_token_ids": prompt_ids}
        if not body.get("stream"):
            usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS}
            return 200, top | {"object": "chat.completion", "choices": [choice], "usage": usage}
        delta = {**choice, "delta": choice["message"]}
        del delta["message"]
        event = top | {"object": "chat.completion.chunk", "choices": [delta]}
        return 200, b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"

    def _answer(self, dice: random.Random) -> tuple[list[int], dict[str, Any]]:
        """Return prompt ids, and the choice."""
        prompt_ids, token_ids = (
            [dice.randrange(VOCABULARY) for _ in range(count)] for count in (PROMPT_TOKENS, ANSWER_TOKENS)
        )
        logprobs = [
            {"token": "x", "logprob": logprob, "bytes": [120], "top_logprobs": []}
            for logprob in self._base.logprobs(prompt_ids, token_ids)
        ]
        message = {"role": "assistant", "content": "x" * ANSWER_TOKENS}
        choice = {"index": 0, "message": message, "logprobs": {"content": logprobs}, "finish_reason": "stop"}
        return prompt_ids, choice | {"token_ids": token_ids}


if __name__ == "__main__":
    serve(Instant(load()))
