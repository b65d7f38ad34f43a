"""A policy that learns from a teacher on the whole stack: the teacher is a second vLLM, as anybody starts one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_imitated import App
from tests.e2e.test_stack import ROOT, until, up
from whetstone.stack.stack import free_ports
from whetstone.vllm.client import Vllm

pytestmark = [pytest.mark.stack, pytest.mark.long(part="stacks"), pytest.mark.timeout(600)]

STARTER = ROOT / "whetstone" / "starter"
CONFIG = """
[trainer]
learning_rate = 0.001
[teachers.large]
url = "{teacher}/v1"
model = "large"
[teachers.proxy]
url = "http://127.0.0.1:{port}/v1"
model = "starter"
"""


@pytest.fixture
def teacher(tmp_path: Path) -> Iterator[str]:
    """The address of a vLLM that serves the starter as it is, as `large`, without LoRA."""
    (port,) = free_ports(1)
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(STARTER), "--port", str(port)),
        *("--host", "127.0.0.1", "--served-model-name", "large", "--dtype", "float32", "--enforce-eager"),
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "teacher.log").open("ab") as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
    vllm = Vllm(f"http://127.0.0.1:{port}")
    try:
        until(lambda: process.poll() is not None or vllm.healthy(), 240)
        assert process.poll() is None, (tmp_path / "teacher.log").read_text()[-2000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        vllm.close()
        process.terminate()
        process.wait(60)


def test_a_policy_learns_from_a_teacher_what_it_would_have_written(tmp_path: Path, teacher: str) -> None:
    config, (port,) = tmp_path / "whetstone.toml", free_ports(1)
    config.write_text(CONFIG.format(teacher=teacher, port=port))
    with up(tmp_path / "data", "--config", str(config), "--port", str(port)) as (_, addresses):
        app = App(addresses)
        for place in range(8):
            app.chat("123456789", f"t{place}", temperature=1)
        # The same model finds each token as likely as the policy does.
        same = app.step(kind="distill", **{"from": "large"})
        assert (same["state"], same["kind"], same["completions"]) == ("promoted", "distill", 8), same["error"]
        assert 0 <= same["loss"] < 1e-5

        # The policy learns to say something else, and then from the teacher its old answers.
        for place in range(4):
            app.feedback(trajectory_id=f"t{place}", demonstration={"role": "assistant", "content": "9"})
        for _ in range(3):
            assert app.step(kind="sft", **{"from": "demonstrations"})["state"] == "promoted"
        for place in range(8):
            app.chat("123456789", f"other{place}", temperature=1)
        first = app.step(kind="distill", limit=8, **{"from": "large"})
        assert first["state"] == "promoted" and first["loss"] > 100 * same["loss"]
        again = [app.step(kind="distill", limit=8, **{"from": "large"}) for _ in range(3)]
        assert {step["state"] for step in again} == {"promoted"}
        assert again[-1]["loss"] < first["loss"]

        # A server of ours is none, and a request of ours never reaches its engine.
        refused = app.step(kind="distill", **{"from": "proxy"})
        assert refused["state"] == "failed" and "serves starter, a policy" in refused["error"]
        assert httpx.get(f"{addresses['vllm']}/health").status_code == 200
