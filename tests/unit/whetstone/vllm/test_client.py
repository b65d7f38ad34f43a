"""vLLM's command line, and its control calls when they go wrong."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server
from whetstone.config.settings import Settings
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused, command, environment


def flags(settings: Settings) -> dict[str, str]:
    """The command line's pairs; a flag without a value has the next flag as one."""
    line = command(settings, 8123)
    return {flag: value for flag, value in zip(line, [*line[1:], ""], strict=True) if flag.startswith("--")}


def test_the_command_line_serves_adapters_and_the_logprobs_that_were_sampled_from() -> None:
    line = flags(Settings(seed=7))
    assert line["--port"] == "8123" and line["--host"] == "127.0.0.1"
    assert line["--served-model-name"] == "starter@v0"
    assert line["--seed"] == "7"
    assert line["--logprobs-mode"] == "processed_logprobs"
    assert line["--generation-config"] == "vllm"
    assert line["--block-size"] == "32"
    assert int(line["--max-cpu-loras"]) >= int(line["--max-loras"]) == 6
    assert {"--enable-lora", "--enable-auto-tool-choice"} <= line.keys()
    assert "--max-model-len" not in line
    assert "--enable-prefix-caching" not in line  # vLLM's default


def test_every_policy_has_version_0_under_its_own_name() -> None:
    line = command(Settings(policies=("second",), vllm={"max_loras": 8}), 1)
    at = line.index("--served-model-name")
    assert line[at + 1 : at + 3] == ["starter@v0", "second@v0"]


def test_the_parsers_are_those_of_the_models_family_unless_the_settings_name_others() -> None:
    assert flags(Settings())["--tool-call-parser"] == "hermes"
    assert "--reasoning-parser" not in flags(Settings())
    assert flags(Settings(model="Qwen/Qwen3-8B"))["--reasoning-parser"] == "qwen3"
    named = Settings(model="Qwen/Qwen3-8B", vllm={"tool_call_parser": "qwen3_xml", "reasoning_parser": "hf"})
    assert (flags(named)["--tool-call-parser"], flags(named)["--reasoning-parser"]) == ("qwen3_xml", "hf")


def test_adapters_may_come_and_go_while_it_runs() -> None:
    assert environment(Settings())["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_it_can_sleep_only_where_it_shares_its_accelerator() -> None:
    alone, shared = Settings(), Settings(vllm={"shares_device": True})
    assert "--enable-sleep-mode" not in command(alone, 1) and "VLLM_SERVER_DEV_MODE" not in environment(alone)
    assert "--enable-sleep-mode" in command(shared, 1) and environment(shared)["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_gpu_has_graphs_blocks_and_its_share_of_the_card_and_the_cpu_its_own() -> None:
    on_cpu = command(Settings(vllm={"gpu_memory_utilization": 0.5, "devices": (0, 1)}), 1, cpu=True)
    assert "--enforce-eager" in on_cpu and on_cpu[on_cpu.index("--block-size") + 1] == "32"
    assert not {"--gpu-memory-utilization", "--tensor-parallel-size"} & set(on_cpu)
    plain = command(Settings(), 1, cpu=False)
    cpus_alone = {"--enforce-eager", "--block-size", "--distributed-executor-backend", "--worker-cls"}
    assert not (cpus_alone | {"--gpu-memory-utilization"}) & set(plain)
    vllm = {"gpu_memory_utilization": 0.84, "replicas": 2, "devices": (0, 1, 2, 3), "enforce_eager": True}
    line = command(Settings(vllm=vllm | {"block_size": 16}), 1, cpu=False)
    pairs = dict(pairwise(line))
    assert (pairs["--gpu-memory-utilization"], pairs["--tensor-parallel-size"]) == ("0.84", "2")
    assert "--enforce-eager" in line and pairs["--block-size"] == "16"


def test_what_the_settings_add_is_added_last() -> None:
    settings = Settings(vllm={"max_model_len": 512, "extra_args": ("--swap-space", "0")})
    assert flags(settings)["--max-model-len"] == "512"
    assert command(settings, 1)[-2:] == ["--swap-space", "0"]


@pytest.mark.parametrize(("rank", "allowed"), [(1, "1"), (4, "8"), (16, "16"), (20, "32"), (600, "600")])
def test_the_largest_rank_is_one_that_vllm_takes(rank: int, allowed: str) -> None:
    assert flags(Settings(trainer={"lora_rank": rank}))["--max-lora-rank"] == allowed


@pytest.mark.parametrize(
    ("config", "wanted", "given"),
    [
        ('{"dtype": "float32"}', "auto", "float32"),
        ('{"torch_dtype": "float32"}', "auto", "float32"),  # as transformers wrote it before 5
        ('{"dtype": "bfloat16"}', "auto", "auto"),
        ("{}", "auto", "auto"),
        ('{"dtype": "float32"}', "bfloat16", "bfloat16"),
        (None, "auto", "auto"),
    ],
)
def test_a_float32_model_stays_one(tmp_path: Path, config: str | None, wanted: str, given: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert flags(Settings(model=str(tmp_path), vllm={"dtype": wanted}))["--dtype"] == given


class FakeVllm(Server):
    """Answers every call with `status` and `content`; what it was asked stands in `asked`."""

    def __init__(self) -> None:
        self.status = 200
        self.content = b"{}"
        self.speaks = threading.Event()
        """Completions are answered while it is set."""
        self.speaks.set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        super().__init__(FakeHandler)

    def answers(self, content: Any, status: int = 200) -> None:
        self.status, self.content = status, content if isinstance(content, bytes) else json.dumps(content).encode()

    def close(self) -> None:
        self.speaks.set()
        super().close()


class FakeHandler(Handler):
    protocol_version = "HTTP/1.0"  # each answer ends its connection
    server: FakeVllm

    def respond(self, body: dict[str, Any]) -> None:
        self.server.asked.append((self.path, body))
        if self.path == "/v1/completions" and not self.server.speaks.wait(10):
            return
        self.whole(self.server.status, self.server.content, content_type=None)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        yield server


@pytest.fixture
def control(server: FakeVllm) -> Iterator[Vllm]:
    control = Vllm(server.url)
    yield control
    control.close()


def completion(token_ids: Any, logprobs: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}}]}


def test_the_names_it_serves(server: FakeVllm, control: Vllm) -> None:
    server.answers({"object": "list", "data": [{"id": "starter@v0", "root": "/m"}, {"id": "starter@v1"}]})
    assert control.models() == {"starter@v0", "starter@v1"}


def test_an_adapter_is_loaded_under_its_name_and_never_in_place(server: FakeVllm, control: Vllm) -> None:
    server.answers(b"Success: LoRA adapter 'starter@v1' added successfully.")
    control.load("starter@v1", Path("/adapters/starter@v1"))
    control.unload("starter@v1")
    assert server.asked == [
        ("/v1/load_lora_adapter", {"lora_name": "starter@v1", "lora_path": "/adapters/starter@v1"}),
        ("/v1/unload_lora_adapter", {"lora_name": "starter@v1"}),
    ]


def test_a_sample_brings_ids_and_logprobs(server: FakeVllm, control: Vllm) -> None:
    server.answers(completion([3, 4], [-0.5, -1]))
    sampled = control.sample("starter@v1", (1, 2), 8, seed=3)
    assert (sampled.token_ids, sampled.logprobs) == ([3, 4], [-0.5, -1.0])
    ((path, body),) = server.asked
    assert path == "/v1/completions"
    assert (body["prompt"], body["temperature"], body["return_token_ids"]) == ([[1, 2]], 1.0, True)


def test_many_samples_come_by_prompt(server: FakeVllm, control: Vllm) -> None:
    answers = [completion([token], [-0.5])["choices"][0] for token in range(6)]
    server.answers({"choices": answers})
    sampled = control.sample_many("starter@v1", [(1, 2), (3,)], 8, seed=3, choices=3)
    assert [[one.token_ids for one in each] for each in sampled] == [[[0], [1], [2]], [[3], [4], [5]]]
    ((_, body),) = server.asked
    assert (body["prompt"], body["n"], body["seed"]) == ([[1, 2], [3]], 3, 3)
    server.answers({"choices": answers[:5]})
    with pytest.raises(VllmRefused, match="5 answers came back, not 3 to each of 2"):
        control.sample_many("starter@v1", [(1, 2), (3,)], 8, seed=3, choices=3)


@pytest.mark.parametrize(
    "answer",
    [
        completion([], []),
        completion([3, 4], [-0.5]),
        completion([3], [None]),
        completion(None, [-0.5]),
        {"choices": [{"token_ids": [3], "logprobs": None}]},
        {"choices": []},
        {},
        b"<html>",
    ],
)
def test_an_answer_without_whole_ids_and_logprobs_is_refused(server: FakeVllm, control: Vllm, answer: Any) -> None:
    server.answers(answer)
    with pytest.raises(VllmRefused):
        control.sample("starter@v1", (1, 2), 8, seed=0)


def test_a_chat_is_rendered_with_what_its_template_takes(server: FakeVllm, control: Vllm) -> None:
    server.answers({"tokens": [1, 2], "count": 2, "max_model_len": 64})
    messages = [{"role": "user", "content": "hi"}]
    assert control.render("starter@v0", messages, opened=True) == [1, 2]
    tools, arguments = [{"type": "function"}], {"enable_thinking": False}
    control.render("starter@v0", messages, opened=False, tools=tools, template_arguments=arguments)
    plain = {"model": "starter@v0", "messages": messages}
    assert server.asked == [
        ("/tokenize", plain | {"add_generation_prompt": True}),
        ("/tokenize", plain | {"add_generation_prompt": False, "tools": tools, "chat_template_kwargs": arguments}),
    ]


def test_an_error_of_it_is_passed_on_in_its_words(server: FakeVllm, control: Vllm) -> None:
    server.answers({"error": {"message": "already been loaded"}}, status=400)
    with pytest.raises(VllmRefused, match="400.*already been loaded") as refused:
        control.load("starter@v1", Path("/adapters/starter@v1"))
    assert refused.value.status == 400


def test_another_server_at_its_address_is_told_apart(server: FakeVllm, control: Vllm) -> None:
    server.answers(b"<html>welcome</html>")
    with pytest.raises(VllmRefused, match=r"/v1/models answers, but not as vLLM does"):
        control.models()


def test_nobody_at_its_address_is_down(server: FakeVllm) -> None:
    control = Vllm("http://127.0.0.1:1")
    assert control.healthy() is False
    with pytest.raises(VllmDown, match="does not answer /v1/models"):
        control.models()
    control.close()


def test_it_is_healthy_only_if_it_says_so(server: FakeVllm, control: Vllm) -> None:
    assert control.healthy() is True
    server.answers(b"", status=503)
    assert control.healthy() is False


def test_an_engine_that_speaks_lives(server: FakeVllm, control: Vllm) -> None:
    server.answers(completion([3], [-0.5]))
    assert control.alive("starter@v0") is True
    assert [path for path, _ in server.asked] == ["/health", "/v1/completions"]
    assert server.asked[1][1] == {"model": "starter@v0", "prompt": [0], "max_tokens": 1}


def test_an_engine_whose_server_says_that_it_died_is_dead(server: FakeVllm, control: Vllm) -> None:
    server.answers(b"", status=503)
    assert control.alive("starter@v0") is False


def test_an_engine_that_says_nothing_lives_only_if_it_takes_steps(
    server: FakeVllm, control: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whetstone.vllm.client.TOKEN_TIMEOUT_S", 0.2)
    server.speaks.clear()

    def at_step(step: float) -> bool | None:
        server.answers(f'vllm:iteration_tokens_total_count{{engine="0",model_name="starter@v0"}} {step}\n'.encode())
        return control.alive("starter@v0")

    # One look does not tell whether the count grows.
    assert [at_step(7.0), at_step(7.0), at_step(8.0), at_step(8.0)] == [None, None, True, None]
    server.speaks.set()
    assert at_step(9.0) is True
    server.speaks.clear()
    # What was counted before it spoke the last time does not matter.
    assert [at_step(10.0), at_step(10.0)] == [None, None]


def test_an_engine_that_sleeps_lives_though_it_says_nothing(
    server: FakeVllm, control: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whetstone.vllm.client.TOKEN_TIMEOUT_S", 0.2)
    server.speaks.clear()
    server.answers({"is_sleeping": True})
    assert control.alive("starter@v0") is True
    server.answers({"is_sleeping": False})
    assert control.alive("starter@v0") is None


def test_of_a_server_that_nobody_can_reach_it_cannot_be_told(server: FakeVllm) -> None:
    control = Vllm("http://127.0.0.1:1")
    assert control.alive("starter@v0") is None
    control.close()
