"""The client of the Tinker API: what it waits for, what it sends again, and what it refuses. The server here answers as
planned; the real one is in test_skyrl."""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.unit.trainer.learner.service.conftest import Answer, FakeService, archive_of
from trainer.errors import ServiceDown
from trainer.learner.service import api
from trainer.learner.service.api import Service
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import CONFIG, WEIGHTS


@pytest.fixture
def service(server: FakeService) -> Iterator[Service]:
    opened = Service(TrainingServiceSettings(url=server.url, timeout_s=0.5))
    yield opened
    opened.close()


def test_work_is_requested_and_its_result_fetched(server: FakeService, service: Service) -> None:
    model = service.create("base", rank=8, seed=3, start=None, optimizer=True)
    assert model == "m-1"
    (body,) = server.sent("create_model")
    assert body["session_id"] == "s-1" and body["base_model"] == "base"
    assert body["lora_config"] == {
        "rank": 8, "seed": 3, "train_unembed": False, "train_attn": True, "train_mlp": True
    }  # fmt: skip
    assert service.pass_through(model, [{}], "ppo", {"clip_low_threshold": 0.8}, backward=False) == [[-1.0, -2.0]]
    assert service.update(model, {"learning_rate": 0.1}) == {"skyrl.ai/grad_norm": 2.5}
    assert service.save(model).path == "tinker://m-1/weights/w"


def test_a_result_is_awaited_while_the_lease_is_renewed(server: FakeService) -> None:
    renewed: list[int] = []
    server.planned["retrieve_future"] = [(408, {}), (200, {"type": "try_again"}), (503, {})]
    with closing(Service(TrainingServiceSettings(url=server.url), lambda: renewed.append(1))) as service:
        assert service.save("m-1").path == "tinker://m-1/weights/w"
    assert len(server.sent("save_weights")) == 1 and len(renewed) >= 4


def test_what_is_never_done_is_down(server: FakeService, service: Service) -> None:
    server.planned["retrieve_future"] = [(408, {})] * 1_000
    with pytest.raises(ServiceDown, match="timeout_s = 0.5 s"):
        service.save("m-1")


@pytest.mark.parametrize("status", [500, 503])
def test_work_that_may_have_been_done_is_not_sent_again(server: FakeService, service: Service, status: int) -> None:
    server.planned["forward_backward"] = [(status, {"detail": "no"})]
    with pytest.raises(ServiceDown, match=str(status)):
        service.pass_through("m-1", [{}], "ppo", {}, backward=True)
    assert len(server.sent("forward_backward")) == 1


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("optim_step", (400, {"detail": "unknown model"}), "optim_step: answers 400.*unknown model"),
        ("optim_step", (429, {}), "429"),
        ("optim_step", (408, {}), "408"),
        ("retrieve_future", (400, {"detail": "Model m-1 not loaded"}), "optim_step: .*not loaded"),
        ("retrieve_future", (400, {"detail": "rank too large"}), "rank too large"),
        ("retrieve_future", (200, {"error": "out of memory"}), "out of memory"),
        ("retrieve_future", (200, {"metrics": "none"}), "not as the Tinker API does"),
        ("retrieve_future", (200, b"<html>"), "not as the Tinker API does"),
    ],
)
def test_what_it_refuses_is_said(server: FakeService, service: Service, path: str, answer: Answer, why: str) -> None:
    server.planned[path] = [answer]
    with pytest.raises(ServiceDown, match=why):
        service.update("m-1", {})


def test_a_model_that_cannot_continue_is_freed(server: FakeService, service: Service) -> None:
    server.planned["load_weights"] = [(404, {"detail": "Checkpoint not found"})]
    with pytest.raises(ServiceDown, match="Checkpoint not found"):
        service.create("base", 8, 0, api.Checkpoint("tinker://m-0/weights/w"), optimizer=True)
    assert server.sent("unload_model") == [{"model_id": "m-1", "type": "unload_model"}]


def test_what_is_no_number_is_nan(server: FakeService, service: Service) -> None:
    server.results["forward"] = {"loss_fn_outputs": [{"logprobs": {"data": [None, -2.0]}}]}
    ((first, second),) = service.pass_through("m-1", [{}], "ppo", {}, backward=False)
    assert math.isnan(first) and second == -2.0


def test_outputs_for_each_row_or_none(server: FakeService, service: Service) -> None:
    with pytest.raises(ServiceDown, match="1 outputs for 2 rows"):
        service.pass_through("m-1", [{}, {}], "ppo", {}, backward=False)


def test_an_adapter_is_unpacked_and_nothing_else(server: FakeService, service: Service) -> None:
    archive = archive_of({WEIGHTS: b"weights", CONFIG: b"{}", "other.py": b"import os"})
    answer: Callable[[str, dict[str, Any]], Answer] = server.answer
    server.answer = lambda path, body: (200, archive) if path.endswith("/archive") else answer(path, body)  # type: ignore[method-assign]
    assert service.adapter("m-1") == {WEIGHTS: b"weights", CONFIG: b"{}"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_redirect_is_followed_and_our_key_goes_to_no_other_server(
    server: FakeService, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    monkeypatch.setenv("SERVICE_KEY", "tml-1")
    archive = archive_of({WEIGHTS: b"weights", CONFIG: b"{}"})
    with FakeService() as other:
        host = other if elsewhere else server
        for one in (server, other):
            answer = one.answer
            one.answer = lambda path, body, answer=answer: (200, archive) if path == "/stored" else answer(path, body)  # type: ignore[method-assign,misc]
        server.redirects = {"/archive": f"{host.url}/stored"}
        with closing(Service(TrainingServiceSettings(url=server.url, api_key_env="SERVICE_KEY"))) as service:
            assert service.adapter("m-1")[WEIGHTS] == b"weights"
        (key,) = [key for path, _, key in host.requests if path == "/stored"]
    assert key == (None if elsewhere else "tml-1")


@pytest.mark.parametrize(
    ("archive", "why"),
    [(b"nothing", "no archive"), (archive_of({"a": b""}), f"no {CONFIG} and no")],
    ids=["none", "other"],
)
def test_an_archive_without_an_adapter_is_refused(
    server: FakeService, service: Service, archive: bytes, why: str
) -> None:
    answer = server.answer
    server.answer = lambda path, body: (200, archive) if path.endswith("/archive") else answer(path, body)  # type: ignore[method-assign]
    with pytest.raises(ServiceDown, match=why):
        service.adapter("m-1")


def test_its_key_is_of_the_environment(server: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainingServiceSettings(url=server.url, api_key_env="SERVICE_KEY")
    with pytest.raises(ServiceDown, match="no SERVICE_KEY"):
        Service(settings)
    monkeypatch.setenv("SERVICE_KEY", "tml-1")
    Service(settings).close()
    assert server.requests[-1][2] == "tml-1"


def test_its_models_are_freed_at_the_end(server: FakeService, service: Service) -> None:
    service.create("base", 8, 0, None, optimizer=True)
    service.close()
    assert server.sent("unload_model") == [{"model_id": "m-1", "type": "unload_model"}]


def test_nobody_there_is_down() -> None:
    with pytest.raises(ServiceDown, match="cannot be reached"):
        Service(TrainingServiceSettings(url="http://127.0.0.1:9"))
