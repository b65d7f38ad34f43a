"""What the examples talk to, a small server that records all requests, and how their scripts are run and looked at."""

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer


class FakeOpenAI(Server):
    """Speaks the OpenAI wire: a subclass says what. Refuses the first `refused` requests."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.headers_seen: list[dict[str, str]] = []
        """Of each request for an answer, refused or not, under lower-case names."""
        self.feedback: list[Any] = []
        self.refused = 0
        super().__init__(Answer)

    def say(self, number: int, board: str) -> str:
        """What `chatcmpl-{number}` answers to a board, the request's last message. Requests count from 1."""
        raise NotImplementedError

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer: what `say` says, as often as the request wants choices."""
        fields = chat_answer(self.say(number, body["messages"][-1]["content"]), "m", id=f"chatcmpl-{number}")
        (choice,) = fields["choices"]
        return fields | {"choices": [choice | {"index": index} for index in range(body.get("n") or 1)]}


class Answer(Handler):
    server: FakeOpenAI

    def respond(self, body: dict[str, Any]) -> None:
        if self.path == "/v1/feedback":
            self.server.feedback.append(body)
            self.whole(202, {"id": "feedback"})
            return
        with self.server.lock:
            self.server.headers_seen.append({name.lower(): value for name, value in self.headers.items()})
            number = len(self.server.headers_seen)
        if number <= self.server.refused:
            self.whole(503, {"error": {"message": "not yet"}})
            return
        self.whole(200, self.server.answer(number, body))


def command(script: Path, server: Server, *flags: str) -> list[str]:
    """The script's command line, with the server as its only address."""
    return [sys.executable, str(script), "--base-url", f"{server.url}/v1", *flags]


def run(script: Path, server: Server, *flags: str) -> dict[str, Any]:
    """What the script reports, in its last line."""
    done = subprocess.run(command(script, server, *flags), capture_output=True, text=True, timeout=240, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def foreign_imports(script: Path) -> set[str]:
    """What the script imports beside the standard library."""
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    return imported - set(sys.stdlib_module_names)
