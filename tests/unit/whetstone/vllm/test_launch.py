"""What is printed for those who start vLLM by other means is what `up` starts, but for where it listens."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from whetstone.config.proxy import VllmSettings
from whetstone.config.settings import Settings
from whetstone.vllm import client
from whetstone.vllm.launch import arguments, lines, main

ROOT = Path(__file__).parents[4]


def test_the_arguments_are_ups_but_for_the_address() -> None:
    settings = Settings(model="Qwen/Qwen2.5-7B-Instruct", policies=("second",), vllm=VllmSettings(max_loras=8))
    for cpu in (True, False):
        command, ours = client.command(settings, 8001, cpu=cpu), arguments(settings, cpu=cpu)
        ups = command[command.index("--model") :]
        assert ours == ["0.0.0.0" if one == "127.0.0.1" else one for one in ups]
    assert {"starter@v0", "second@v0"} <= set(ours)


def test_the_build_without_a_gpu_has_a_worker_of_ours_in_the_engine_and_other_machines_are_not_asked_to() -> None:
    assert client.is_cpu_build(), "of this environment; a GPU's leaves the executor to vLLM"
    command = client.command(Settings(), 8001)
    for flag, end in (("--distributed-executor-backend", ".UniProcExecutor"), ("--worker-cls", ".Worker")):
        assert command[command.index(flag) + 1].endswith(end)
        assert flag not in arguments(Settings()) and flag not in arguments(Settings(), cpu=True)


def test_what_is_printed_is_shell_words_with_the_environment_before_them() -> None:
    settings = Settings()
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines(settings)))
    given = dict(word.split("=", 1) for word in words[: words.index("python3")])
    assert given == client.environment(settings)
    assert words[words.index("--model") :] == arguments(settings)


def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whetstone.vllm.launch"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WHETSTONE_PROXY__PORT": "lots"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "proxy.port" in done.stderr
    helped = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert helped.returncode == 0 and "how vLLM is to be started" in helped.stdout


@pytest.mark.parametrize(("given", "eager"), [([], False), (["--cpu"], True)])
def test_what_is_printed_is_for_gpus_unless_it_is_asked_for_the_cpus(
    given: list[str], eager: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert ("--enforce-eager" in printed) is eager and ("--block-size 32" in printed) is eager
