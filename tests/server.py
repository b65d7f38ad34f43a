"""A server of a test's own, on a real socket: the plumbing beneath the fake model servers. Knows no route."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Reads JSON and writes whole answers. A fake says in `respond` what it answers, and to which server it belongs."""

    protocol_version = "HTTP/1.1"

    def respond(self, body: dict[str, Any]) -> None:
        """Answer a request; the body of a GET is empty."""
        raise NotImplementedError

    def whole(self, status: int, content: Any, content_type: str | None = "application/json") -> None:
        """One answer: bytes as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if content_type is not None:
            self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.respond({})

    def do_POST(self) -> None:
        self.respond(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}"))

    def log_message(self, *_: Any) -> None:
        """Nothing: the tests read what was asked."""


class Server(ThreadingHTTPServer):
    """Answers at `url`, in threads, until it is closed or its `with` ends. What its handlers share stands in it."""

    request_queue_size = 64

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def __exit__(self, *_: Any) -> None:
        self.close()
