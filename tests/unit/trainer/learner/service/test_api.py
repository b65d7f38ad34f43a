"""The client of the Tinker API: what it waits for, what it sends again, and what it refuses. The server here answers as
it is told to; the real one is in test_skyrl."""

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server
from trainer.errors import ServiceDown, ServiceRefused
from trainer.learner.service import api
from trainer.learner.service.api import Service
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import CONFIG, WEIGHTS

Answer = tuple[int, Any]


class _Handler(Handler):
    server: "_Fake"

    def respond(self, body: dict[str, Any]) -> None:
        path = self.path.removeprefix("/api/v1/")
        self.server.requests.append((path, body, self.headers.get("x-api-key")))
        status, content = self.server.answer(path, body)
        self.whole(status, content)


class _Fake(Server):
    """Does each piece of work at once; `planned` has other answers, by path, each given once."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.planned: dict[str, list[Answer]] = {}
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
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Fake]:
    monkeypatch.setattr(api, "PAUSE_S", 0.01)
    with _Fake() as fake:
        yield fake


@pytest.fixture
def service(server: _Fake) -> Iterator[Service]:
    opened = Service(TrainingServiceSettings(url=server.url, timeout_s=0.5))
    yield opened
    opened.close()


def test_work_is_requested_and_its_result_fetched(server: _Fake, service: Service) -> None:
    model = service.create("base", rank=8, seed=3)
    assert model == "m-1"
    (body,) = server.sent("create_model")
    assert body["session_id"] == "s-1" and body["base_model"] == "base"
    assert body["lora_config"] == {
        "rank": 8, "seed": 3, "train_unembed": False, "train_attn": True, "train_mlp": True
    }  # fmt: skip
    assert service.pass_through(model, [{}], "ppo", {"clip_low_threshold": 0.8}, backward=False) == [[-1.0, -2.0]]
    assert service.update(model, {"learning_rate": 0.1}) == {"skyrl.ai/grad_norm": 2.5}
    assert service.save(model).path == "tinker://m-1/weights/w"


def test_a_result_is_awaited_while_the_lease_is_renewed(server: _Fake, service: Service) -> None:
    renewed: list[int] = []
    service.renew = lambda: renewed.append(1)
    server.planned["retrieve_future"] = [(408, {}), (200, {"type": "try_again"}), (503, {})]
    assert service.save("m-1").path == "tinker://m-1/weights/w"
    assert len(server.sent("save_weights")) == 1 and len(renewed) >= 4


def test_what_is_never_done_is_down(server: _Fake, service: Service) -> None:
    server.planned["retrieve_future"] = [(408, {})] * 1_000
    with pytest.raises(ServiceDown, match="timeout_s = 0.5 s"):
        service.save("m-1")


@pytest.mark.parametrize("status", [500, 503])
def test_work_that_may_have_been_done_is_not_sent_again(server: _Fake, service: Service, status: int) -> None:
    server.planned["forward_backward"] = [(status, {"detail": "no"})]
    with pytest.raises(ServiceDown, match=str(status)):
        service.pass_through("m-1", [{}], "ppo", {}, backward=True)
    assert len(server.sent("forward_backward")) == 1


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("optim_step", (400, {"detail": "unknown model"}), "unknown model"),
        ("retrieve_future", (400, {"detail": "rank too large"}), "rank too large"),
        ("retrieve_future", (200, {"error": "out of memory"}), "out of memory"),
        ("retrieve_future", (200, {"metrics": "none"}), "not as the Tinker API does"),
        ("retrieve_future", (200, b"<html>"), "not as the Tinker API does"),
    ],
)
def test_what_it_refuses_is_said(server: _Fake, service: Service, path: str, answer: Answer, why: str) -> None:
    server.planned[path] = [answer]
    with pytest.raises(ServiceRefused, match=why):
        service.update("m-1", {})


def test_a_model_that_is_gone_is_down_and_what_was_saved_and_is_gone_is_refused(
    server: _Fake, service: Service
) -> None:
    server.planned |= {"optim_step": [(404, {})], "load_weights": [(404, {"detail": "Checkpoint not found"})]}
    with pytest.raises(ServiceDown, match="404"):
        service.update("m-1", {})
    with pytest.raises(ServiceRefused, match="Checkpoint not found"):
        service.load("m-1", api.Checkpoint("tinker://m-0/weights/w"), optimizer=True)


def test_outputs_for_each_row_or_none(server: _Fake, service: Service) -> None:
    with pytest.raises(ServiceRefused, match="1 outputs for 2 rows"):
        service.pass_through("m-1", [{}, {}], "ppo", {}, backward=False)


def _archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_an_adapter_is_unpacked_and_nothing_else(server: _Fake, service: Service) -> None:
    archive = _archive({WEIGHTS: b"weights", CONFIG: b"{}", "other.py": b"import os"})
    answer: Callable[[str, dict[str, Any]], Answer] = server.answer
    server.answer = lambda path, body: (200, archive) if path.endswith("/archive") else answer(path, body)  # type: ignore[method-assign]
    assert service.adapter("m-1") == {WEIGHTS: b"weights", CONFIG: b"{}"}


@pytest.mark.parametrize(
    ("archive", "why"),
    [(b"nothing", "no archive"), (_archive({"a": b""}), f"no {CONFIG} and no")],
    ids=["none", "other"],
)
def test_an_archive_without_an_adapter_is_refused(server: _Fake, service: Service, archive: bytes, why: str) -> None:
    answer = server.answer
    server.answer = lambda path, body: (200, archive) if path.endswith("/archive") else answer(path, body)  # type: ignore[method-assign]
    with pytest.raises(ServiceRefused, match=why):
        service.adapter("m-1")


def test_its_key_is_of_the_environment(server: _Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainingServiceSettings(url=server.url, api_key_env="SERVICE_KEY")
    with pytest.raises(ServiceRefused, match="no SERVICE_KEY"):
        Service(settings)
    monkeypatch.setenv("SERVICE_KEY", "tml-1")
    Service(settings).close()
    assert server.requests[-1][2] == "tml-1"


def test_its_models_are_freed_at_the_end(server: _Fake, service: Service) -> None:
    service.create("base", 8, 0)
    service.close()
    assert server.sent("unload_model") == [{"model_id": "m-1", "type": "unload_model"}]


def test_nobody_there_is_down() -> None:
    with pytest.raises(ServiceDown, match="cannot be reached"):
        Service(TrainingServiceSettings(url="http://127.0.0.1:9"))
