"""An OpenAI-compatible server that plays tic-tac-toe by rule: it wins if it can, blocks if it must.

It answers the board in the last message, in the form of whetstone/demo/tictactoe/game.py. Standard library only.
"""

import json
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

BY_WORTH = "519372846"
"""Order of cells where there is nothing to win or block: the middle, the corners, the edges."""


def move(board: str) -> str:
    """Return a cell that makes a line, else one that blocks the opponent's line, else the best free one."""
    for mark in "XO":
        for cell in game.free(board):
            if game.result(game.place(board, cell, mark)) == mark:
                return cell
    return next(cell for cell in BY_WORTH if cell in board)


class Teacher(ThreadingHTTPServer):
    """Answers at `url`, in threads, until its `with` ends."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": move(asked["messages"][-1]["content"])}
        answer = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": 0,
            "model": asked["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing: the database has the conversations."""
