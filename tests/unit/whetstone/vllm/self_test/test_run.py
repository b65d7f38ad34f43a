"""The self-test: against a real vLLM, and against servers with one fault each."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from whetstone.config.settings import Settings
from whetstone.stack.supervisor import Part, Supervisor
from whetstone.vllm import client
from whetstone.vllm.client import Vllm
from whetstone.vllm.self_test import run
from whetstone.vllm.self_test.run import SelfTest

ALL = (
    "ids in plain answers", "ids in streams", "logprob mode", "sampling defaults", "adapters at run time",
    "ids beside tools", "tool calls", "reasoning", "chat template", "seeds",
)  # fmt: skip


def outcomes(test: SelfTest) -> dict[str, bool | None]:
    return {check.name: check.ok for check in test.checks}


def found(test: SelfTest, name: str) -> str:
    return next(check.found for check in test.checks if check.name == name)


@pytest.fixture
def control(fake_vllm: Any) -> Iterator[Vllm]:
    control = Vllm(fake_vllm.url)
    yield control
    control.close()


@pytest.mark.stack
def test_a_real_vllm_as_up_starts_it_has_all_that_training_needs(vllm_url: str) -> None:
    control = Vllm(vllm_url)
    before = control.models()  # other tests' adapters too: they share this server
    test = run.run(control, Settings().served_name)
    assert test.trainable, test
    assert outcomes(test) == dict.fromkeys(ALL, True)
    assert test.vllm_version is not None
    assert control.healthy()
    assert control.models() == before  # no adapter was left behind
    control.close()


@pytest.mark.stack
@pytest.mark.long(part="stacks")
def test_a_real_vllm_with_other_flags_is_told_what_to_change(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    bent = ("--override-generation-config", '{"top_k": 3}', "--no-enable-auto-tool-choice")
    settings = Settings(vllm={"urls": (f"http://127.0.0.1:{port}",), "extra_args": bent})
    environment = client.environment(settings) | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    control, supervisor = Vllm(f"http://127.0.0.1:{port}"), Supervisor(tmp_path)
    try:
        supervisor.start(Part("vllm", client.command(settings, port), environment, control.healthy, 300))
        supervisor.await_ready("vllm")
        test = run.run(control, settings.served_name)
    finally:
        supervisor.stop()
        control.close()
    assert [check.name for check in test.missing] == ["sampling defaults", "adapters at run time"]
    assert "--enable-auto-tool-choice" in found(test, "tool calls")
    assert outcomes(test)["logprob mode"] is True


@pytest.mark.stack
def test_a_real_vllm_is_asked_for_a_model_that_it_has_not(vllm_url: str) -> None:
    control = Vllm(vllm_url)
    test = run.run(control, "nobody@v0")
    assert not test.trainable
    assert "does not exist" in found(test, "ids in plain answers")
    control.close()


def test_a_server_without_a_fault_has_everything(control: Vllm) -> None:
    test = run.run(control, "starter@v0")
    assert outcomes(test) == dict.fromkeys(ALL, True)
    assert (test.trainable, test.vllm_version, test.missing) == (True, "0.32.0", [])


def test_a_server_without_metrics_cannot_be_asked_for_adapters(fake_vllm: Any, control: Vllm) -> None:
    fake_vllm.has_metrics = False
    test = run.run(control, "starter@v0")
    assert outcomes(test)["adapters at run time"] is None and test.trainable


def test_nothing_that_is_asked_makes_vllm_log_an_error(fake_vllm: Any, control: Vllm) -> None:
    """A tool call that the model begins is ended by vLLM's grammar, and no adapter is named that is not there."""
    run.run(control, "starter@v0")
    tools = [tool["function"] for body in fake_vllm.asked for tool in body.get("tools", ())]
    assert tools and all(tool["strict"] and tool["parameters"]["additionalProperties"] is False for tool in tools)
    assert all(load["lora_path"] == "" for load in fake_vllm.loads)


def test_about_fifteen_short_requests_are_made_and_none_that_could_hurt(fake_vllm: Any, control: Vllm) -> None:
    run.run(control, "starter@v0")
    assert len(fake_vllm.asked) <= 15
    for body in fake_vllm.asked:
        assert body["max_tokens"] < 200
        assert not {"prompt_logprobs", "echo"} & body.keys()


@pytest.mark.parametrize(
    ("fault", "name", "seen"),
    [
        ({"strips": ("token_ids",)}, "ids in plain answers", "no token_ids"),
        ({"strips": ("prompt_token_ids",)}, "ids in plain answers", "no prompt_token_ids"),
        ({"strips": ("logprobs",)}, "ids in plain answers", "3 sampled ids, 0 logprobs"),
        ({"strips": ("token_ids",), "strips_streams_only": True}, "ids in streams", "no token_ids"),
        ({"mode": "raw"}, "logprob mode", "raw: "),
        ({"mode": "raw_logits"}, "logprob mode", "logits, not logprobs"),
        ({"defaults": {"top_k": 2}}, "sampling defaults", "cuts tokens off"),
        ({"defaults": {"temperature": 0.6}}, "sampling defaults", "unset fields move logprobs"),
        ({"takes_adapters": False}, "adapters at run time", "off: vLLM has no route"),
        ({"figures": "vllm:num_requests_waiting 0"}, "adapters at run time", "without --enable-lora"),
    ],
)
def test_what_training_needs_and_lacks_is_named(
    fake_vllm: Any, control: Vllm, fault: dict[str, Any], name: str, seen: str
) -> None:
    vars(fake_vllm).update(fault)
    test = run.run(control, "starter@v0")
    assert outcomes(test)[name] is False
    assert seen in found(test, name)
    assert name in [check.name for check in test.missing]
    assert not test.trainable


@pytest.mark.parametrize(
    ("fault", "name", "seen"),
    [
        ({"takes_tools": False}, "tool calls", "--enable-auto-tool-choice"),
        ({"template_keeps_answers": False}, "chat template", "earlier answers are rewritten"),
    ],
)
def test_what_only_apps_miss_does_not_stop_training(
    fake_vllm: Any, control: Vllm, fault: dict[str, Any], name: str, seen: str
) -> None:
    vars(fake_vllm).update(fault)
    test = run.run(control, "starter@v0")
    assert outcomes(test)[name] is False
    assert seen in found(test, name)
    assert test.trainable


def test_a_server_that_takes_no_tools_is_asked_for_its_template_all_the_same(fake_vllm: Any, control: Vllm) -> None:
    fake_vllm.takes_tools = False
    test = run.run(control, "starter@v0")
    assert outcomes(test)["chat template"] is True
    assert outcomes(test)["ids beside tools"] is None


@pytest.mark.parametrize(
    "whole",
    [
        (200, b"<html>welcome</html>"),
        (200, b"null"),
        (200, b"[1]"),
        (200, b'{"choices": "none"}'),
        (200, b'{"choices": [{"message": {"content": "hi"}, "logprobs": {"content": [{}]}}]}'),
        (401, b'{"error": {"message": "who are you?"}}'),
        (500, b"\xff\xfe"),
    ],
)
def test_a_server_that_is_no_vllm_fails_the_test_and_breaks_nothing(
    fake_vllm: Any, control: Vllm, whole: tuple[int, bytes]
) -> None:
    fake_vllm.whole = whole
    test = run.run(control, "starter@v0")
    assert not test.trainable
    assert True not in [check.ok for check in test.checks if check.needed]
    assert test.vllm_version is None


def test_a_server_that_falls_silent_is_not_waited_for(fake_vllm: Any, control: Vllm) -> None:
    fake_vllm.silent.set()
    test = run.run(control, "starter@v0", limit_s=0.2)
    assert outcomes(test) == dict.fromkeys(ALL)
    assert not test.trainable


def test_nobody_at_the_address_leaves_everything_open() -> None:
    control = Vllm("http://127.0.0.1:1")
    test = run.run(control, "starter@v0")
    assert outcomes(test) == dict.fromkeys(ALL)
    assert not test.trainable
    control.close()
