"""A model server that loads adapters and answers with their logprobs, which the learner computes.

It is a process of its own, which outlives its trainer: `python -m benchmarks.fakes.adapter_vllm` prints its address.
Completions are always the same tokens, and each takes a moment, as vLLM's do. A chat is answered at once, by one of a
few fixed answers with the logprobs of the base model, so that it can be trained on.
"""

import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server
from benchmarks.fakes.wire import CHAT, DONE, Answer, Call, Token
from trainer.learner.learner import Learner
from whetstone.config.settings import Settings, load
from whetstone.domain.ids import version_id

COMPLETION_IDS = [5, 9, 11, 7]
RESPONSE_TIME_S = 0.05
CHAT_ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 32, 12, 6, 256


class AdapterVllm(Server):
    """Answers at `url` until it is closed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._base = Learner.fresh(settings.model, settings.trainer, settings.seed)
        self._adapters: dict[str, Learner] = {}
        self._loading = threading.Lock()
        """One adapter is loaded after the other, as in vLLM."""
        self._dice = random.Random(settings.seed)
        self._chat_answers = [self._chat_answer() for _ in range(CHAT_ANSWERS)]
        super().__init__(_Handler)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON; bytes are the events of a stream."""
        bases = {version_id(policy, 0): self._base for policy in self._settings.all_trained}
        learners = {**bases, **self._adapters}
        if path == CHAT and body["model"] in learners:
            call = Call(path, "adapter", body, streamed=body.get("stream") is True)
            answer = Answer(call, *self._dice.choice(self._chat_answers))
            return 200, b"".join([*answer.events(), DONE]) if call.streamed else answer.fields()
        time.sleep(RESPONSE_TIME_S)
        match path:
            case "/health":
                return 200, ""
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": name} for name in learners]}
            case "/v1/load_lora_adapter":
                folder, settings = Path(body["lora_path"]), self._settings
                with self._loading:
                    self._adapters[body["lora_name"]] = Learner.resume(settings.model, folder, settings.trainer)
                return 200, "loaded"
            case "/v1/unload_lora_adapter":
                return (200, "unloaded") if self._adapters.pop(body["lora_name"], None) else (404, "no such adapter")
            case "/reset_prefix_cache":
                return 200, ""
            case "/v1/completions" if learner := learners.get(body["model"]):
                choices = []
                for prompt in body["prompt"]:
                    logprobs = learner.logprobs(prompt, COMPLETION_IDS)
                    choices += [{"token_ids": COMPLETION_IDS, "logprobs": {"token_logprobs": logprobs}}] * body["n"]
                return 200, {"choices": choices}
        return 404, {"error": {"message": f"no {path} for {body.get('model')}", "type": "NotFoundError", "code": 404}}

    def _chat_answer(self) -> tuple[list[int], list[Token]]:
        """Return prompt ids, and what is sampled."""
        prompt_ids, token_ids = (
            [self._dice.randrange(VOCABULARY) for _ in range(count)] for count in (PROMPT_TOKENS, ANSWER_TOKENS)
        )
        logprobs = self._base.logprobs(prompt_ids, token_ids)
        return prompt_ids, [Token(token, "x", logprob) for token, logprob in zip(token_ids, logprobs, strict=True)]


class _Handler(Handler):
    disable_nagle_algorithm = True
    server: AdapterVllm

    def respond(self, body: dict[str, Any]) -> None:
        status, answer = self.server.answer(self.path, body)
        self.whole(status, answer, "text/event-stream" if isinstance(answer, bytes) else "application/json")


def main() -> None:
    """Print the address, and serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with AdapterVllm(load()) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main()
