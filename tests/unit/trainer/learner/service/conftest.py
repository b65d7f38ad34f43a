"""A server of the Tinker API that computes nothing: it answers as planned, and has all requests."""

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server
from trainer.learner.service import api

Answer = tuple[int, Any]


class _Handler(Handler):
    server: "FakeService"

    def respond(self, body: dict[str, Any]) -> None:
        path = self.path.removeprefix("/api/v1/")
        self.server.requests.append((path, body, self.headers.get("x-api-key")))
        for ending, address in self.server.redirects.items():
            if path.endswith(ending):
                self.send_response(302)
                self.send_header("location", address)
                self.send_header("content-length", "0")
                self.end_headers()
                return
        status, content = self.server.answer(path, body)
        self.whole(status, content)


class FakeService(Server):
    """Does each piece of work at once; `planned` has other answers, by path, each given once."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.planned: dict[str, list[Answer]] = {}
        self.redirects: dict[str, str] = {}
        """The end of a path -> where the answer lies."""
        self.results: dict[str, Any] = {
            "create_model": {"model_id": "m-1"},
            "forward": {"loss_fn_outputs": [{"logprobs": {"data": [-1.0, -2.0]}}]},
            "optim_step": {"metrics": {"skyrl.ai/grad_norm": 2.5}},
            "save_weights": {"path": "tinker://m-1/weights/w"},
        }
        super().__init__(_Handler)

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if planned := self.planned.get(path):
            return planned.pop(0)
        if path == "create_session":
            return 200, {"session_id": "s-1"}
        if path == "retrieve_future":
            return 200, self.results.get(body["request_id"], {})
        return 200, {"request_id": path}

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [body for name, body, _ in self.requests if name == path]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    monkeypatch.setattr(api, "PAUSE_S", 0.01)
    with FakeService() as fake:
        yield fake


def archive_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()
