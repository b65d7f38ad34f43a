"""The command line as its script runs it, and a small vLLM on the real wire of chat completions, with chosen faults."""

import io
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server
from whetstone.cli.main import main

SERVED = "starter@v0"
LOGITS = {470: 4.0, 3: 3.2, 16: 2.5, 2: 2.0, 307: 1.0}
"""Of every token it says, by token id."""
HELLO = [470, 3, 2]
MINUS_INFINITY = -9999.0


@dataclass
class Ended:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error in one line, however wide the terminal."""
        return " ".join(self.err.split())


@pytest.fixture
def whetstone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command line as its script does, in this process: starting another takes a second and a half."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["whetstone", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal, where pytest has one
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
        output = capfd.readouterr()
        return Ended(code, output.out, output.err)

    return run


@pytest.fixture
def fake_vllm() -> Iterator["FakeVllm"]:
    """One without a fault; set its attributes to give it some."""
    with FakeVllm() as fake:
        yield fake


class FakeVllm(Server):
    """Answers `Hello!` to everything, and calls a tool when it is told to."""

    def __init__(self) -> None:
        self.served = SERVED
        self.mode = "processed"
        self.defaults: dict[str, float] = {}
        """What its model's generation_config says."""
        self.strips: tuple[str, ...] = ()
        """Fields a gateway in front of it loses."""
        self.strips_streams_only = False
        self.takes_tools = self.calls_tools = self.takes_adapters = True
        self.template_keeps_answers = self.has_metrics = True
        self.figures = 'vllm:lora_requests_info{max_lora="6"} 1.0'
        self.whole: tuple[int, bytes] | None = None
        """Status and content of every answer, if it is no vLLM at all."""
        self.silent = threading.Event()
        """Once set, it answers no more chat completion until it is closed."""
        self.asked: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []
        self._closed = threading.Event()
        super().__init__(_Handler)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and content."""
        if self.whole is not None:
            return self.whole
        if path == "/v1/models":
            return _json(200, {"object": "list", "data": [{"id": self.served}]})
        if path == "/version":
            return _json(200, {"version": "0.32.0"})
        if path == "/metrics":
            told = f"vllm:num_requests_running 0\n{self.figures}\n" if self.has_metrics else ""
            return 200 if self.has_metrics else 404, told.encode()
        if path == "/v1/load_lora_adapter":
            self.loads.append(body)
        if path == "/v1/load_lora_adapter" and self.takes_adapters and not body["lora_path"]:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if path != "/v1/chat/completions":
            return _json(404, {"detail": "Not Found"})
        self.asked.append(body)
        if self.silent.is_set():
            self._closed.wait()
        if body.get("tools") and not self.takes_tools:
            return _error(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        return self._stream(body) if body.get("stream") else _json(200, self._plain(body))

    def _plain(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = HELLO[: body["max_tokens"]]
        message: dict[str, Any] = {"role": "assistant", "content": "Hello!"}
        if isinstance(body.get("tool_choice"), dict) and self.calls_tools:
            function = {"name": body["tool_choice"]["function"]["name"], "arguments": '{"word": "whetstone"}'}
            call = {"id": "call-1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": [self._logprob(token_id, body) for token_id in ids]},
            "finish_reason": "stop" if len(ids) == len(HELLO) else "length",
            "token_ids": ids,
        }
        prompt = self._prompt(body)
        answer = {"choices": [choice], "prompt_token_ids": prompt, "usage": _usage(prompt, ids)}
        return answer if self.strips_streams_only else self._stripped(answer)

    def _stream(self, body: dict[str, Any]) -> tuple[int, bytes]:
        prompt = self._prompt(body)
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events: list[dict[str, Any]] = [{"choices": [first], "prompt_token_ids": prompt}]
        for token_id, text in zip(HELLO, ("Hello", "!", None), strict=True):
            choice = {
                "index": 0,
                "delta": {} if text is None else {"content": text},
                "logprobs": {"content": [self._logprob(token_id, body)]},
                "finish_reason": "stop" if text is None else None,
                "token_ids": [token_id],
            }
            events.append({"choices": [choice]})
        events.append({"choices": [], "usage": _usage(prompt, HELLO)})
        lines = [f"data: {json.dumps(self._stripped(event))}\n\n" for event in events]
        return 200, "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _stripped(self, answer: dict[str, Any]) -> dict[str, Any]:
        choices = [{k: v for k, v in choice.items() if k not in self.strips} for choice in answer["choices"]]
        return {k: v for k, v in (answer | {"choices": choices}).items() if k not in self.strips}

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        """Per message a start, a role, its content and an end; an answer is the very tokens that were spoken."""
        ids: list[int] = []
        for message in body["messages"]:
            spoken = message["role"] == "assistant" and self.template_keeps_answers
            ids += [1, 11, *HELLO] if spoken else [1, 10, 20 + len(message["content"] or ""), 2]
        return [*ids, 1, 11]

    def _logprob(self, token_id: int, body: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(body)
        ranked = sorted(logprobs, key=lambda token: -logprobs[token])[: body.get("top_logprobs", 0)]
        top = [{"token": f"token_id:{token}", "logprob": logprobs[token]} for token in ranked]
        return {"token": f"token_id:{token_id}", "logprob": logprobs[token_id], "top_logprobs": top}

    def _logprobs(self, body: dict[str, Any]) -> dict[int, float]:
        """Of each token: before temperature and top_k in mode `raw`, after them in mode `processed`."""
        if self.mode == "raw_logits":
            return LOGITS
        if self.mode == "raw":
            return _normalised(LOGITS)
        set_ = {"temperature": 1.0, "top_k": 0} | self.defaults | body
        logits = {token: logit / (set_["temperature"] or 1.0) for token, logit in LOGITS.items()}
        kept = sorted(logits, key=lambda token: -logits[token])[: int(set_["top_k"]) or None]
        return dict.fromkeys(logits, MINUS_INFINITY) | _normalised({token: logits[token] for token in kept})


def _normalised(logits: dict[int, float]) -> dict[int, float]:
    total = math.log(sum(math.exp(logit) for logit in logits.values()))
    return {token: logit - total for token, logit in logits.items()}


def _usage(prompt: list[int], ids: list[int]) -> dict[str, int]:
    return {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}


def _json(status: int, content: Any) -> tuple[int, bytes]:
    return status, json.dumps(content).encode()


def _error(status: int, message: str) -> tuple[int, bytes]:
    return _json(status, {"error": {"message": message, "type": "Error", "param": None, "code": status}})


class _Handler(Handler):
    protocol_version = "HTTP/1.0"  # each answer ends its connection
    server: FakeVllm

    def respond(self, body: dict[str, Any]) -> None:
        self.whole(*self.server.answer(self.path, body), content_type=None)
