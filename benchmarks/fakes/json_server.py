"""An HTTP server of JSON on loopback, with threads: what every fake model server on `http.server` is built on."""

import json
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def chat_answer(text: str, model: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat completion with this text. `fields`: more of them."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": 0, "model": model}
    return head | {"choices": [choice]} | fields


class Handler(BaseHTTPRequestHandler):
    """Reads JSON and writes complete answers. A fake defines `respond`, and which class its server is."""

    protocol_version = "HTTP/1.1"

    def respond(self, body: dict[str, Any]) -> None:
        """Answer a request; the body of a GET is empty."""
        raise NotImplementedError

    def whole(
        self, status: int, content: Any, content_type: str | None = "application/json", *, sent: float = 1.0
    ) -> None:
        """Write one answer: bytes as they are, anything else as JSON. `sent`: the share that is sent before a cut."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if content_type is not None:
            self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: int(len(data) * sent)])
        self.close_connection = self.close_connection or sent < 1

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

    def log_message(self, *_: Any) -> None:
        """Log nothing: tests read the requests, and databases have the conversations."""


class Server(ThreadingHTTPServer):
    """Answers at `url`, in threads, until it is closed or its `with` ends. Its handlers share what it has."""

    request_queue_size = 128

    def __init__(self, handler: type[Handler], port: int = 0, base: str = "") -> None:
        """`base`: the path that its address ends with."""
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}{base}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors as usual, but ignore lost clients: they are killed, or time out."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __exit__(self, *_: Any) -> None:
        self.close()
