"""A model server that outlives its trainer: it loads adapters and answers with them, on vLLM's wire.

It is a process of its own: `python -m benchmarks.faults.killed.vllm` prints its address. Its answers are always the
same tokens; their logprobs are those of the loaded adapter, computed by the learner. Each answer takes a moment, as
vLLM's do.
"""

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trainer.learner.learner import Learner
from whetstone.config.settings import Settings, load

SPOKEN = [5, 9, 11, 7]
ANSWER_S = 0.05


class Server(ThreadingHTTPServer):
    """Answers at `url` until it is ended."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._settings = settings
        self._base = Learner.fresh(settings.model, settings.trainer, settings.seed)
        self._loaded: dict[str, Learner] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON; bytes are the events of a stream."""
        time.sleep(ANSWER_S)
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            names = [self._settings.served_name, *self._loaded]
            return 200, {"object": "list", "data": [{"id": name} for name in names]}
        if path == "/v1/load_lora_adapter":
            folder, settings = Path(body["lora_path"]), self._settings
            self._loaded[body["lora_name"]] = Learner.resume(settings.model, folder, settings.trainer)
            return 200, "loaded"
        if path == "/v1/unload_lora_adapter":
            return (200, "unloaded") if self._loaded.pop(body["lora_name"], None) else (404, "no such adapter")
        learners = {self._settings.served_name: self._base, **self._loaded}
        if path == "/v1/completions" and (learner := learners.get(body["model"])):
            logprobs = learner.logprobs(body["prompt"], SPOKEN)
            return 200, {"choices": [{"index": 0, "token_ids": SPOKEN, "logprobs": {"token_logprobs": logprobs}}]}
        return 404, {"error": {"message": f"no {path} for {body.get('model')}", "type": "NotFoundError", "code": 404}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        self._respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _respond(self, body: dict[str, Any]) -> None:
        status, answer = self.server.answer(self.path, body)
        events = isinstance(answer, bytes)
        data = answer if events else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if events else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def handle_one_request(self) -> None:
        """Handle a request as usual, but ignore a lost client: clients are killed repeatedly."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True


def serve(server: Server) -> None:
    """Print its address, and serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    serve(Server(load()))
