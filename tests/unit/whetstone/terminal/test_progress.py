"""Progress of a start: vLLM's phases from its log, plain lines, and one line on a terminal."""

import io
import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from whetstone.stack.supervisor import Part, Supervisor
from whetstone.terminal.progress import LOADING, Say, show_progress, vllm_phase

LOG = """\
(APIServer pid=14405) INFO 11-25 02:56:19 [model.py:2152] Using max model len 2048
(EngineCore pid=14676) INFO 11-25 02:57:15 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=15034) INFO 11-25 02:57:57 [cpu_model_runner.py:68] Starting to load model m...
Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00,  4.97it/s]
(Worker pid=15034) INFO 11-25 02:57:58 [default_loader.py:501] Loading weights took 0.20 seconds
(EngineCore pid=14676) INFO 11-25 02:57:59 [kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens, Maximum
(EngineCore pid=14676) INFO 11-25 02:58:03 [core.py:402] init engine (profile, create kv cache, warmup model) took 3 s
INFO:     Application startup complete.
"""
PHASES = (
    LOADING, "starting the engine", "loading the model", "loading the weights, 0 %", "loading the weights, 50 %",
    "the weights are loaded", "warming up", "opening the server", "loading the adapters",
)  # fmt: skip


def test_the_last_line_that_is_known_tells_the_phase(tmp_path: Path) -> None:
    log, lines = tmp_path / "vllm.log", LOG.splitlines(keepends=True)
    told = []
    for place in range(len(lines)):
        log.write_text("".join(lines[: place + 1]) + "something else\n")
        told.append(vllm_phase(log))
    assert tuple(told) == PHASES


def test_an_earlier_start_in_the_same_log_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    assert vllm_phase(log) == LOADING
    log.write_text(LOG)
    assert vllm_phase(log, log.stat().st_size) == LOADING


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """A process that logs as vLLM does, a phase each second, and is ready after the last."""
    program = f"import time\nfor line in {LOG.splitlines()!r}:\n    print(line, flush=True); time.sleep(0.6)\n"
    log = tmp_path / "vllm.log"

    def ready() -> bool:
        return log.exists() and "startup complete" in log.read_text()

    return Part("vllm", [sys.executable, "-c", program + "time.sleep(60)"], {}, ready)


def start(part: Part, folder: Path, say: Say, console: Console) -> None:
    supervisor, latest = Supervisor(folder), partial(vllm_phase, folder / "vllm.log")
    try:
        with show_progress(say, console, "starting vLLM", "vLLM is ready", latest) as look:
            supervisor.start(part)
            supervisor.await_ready("vllm", meanwhile=look)
    finally:
        supervisor.stop()


def test_without_a_terminal_each_phase_is_a_plain_line_with_its_seconds(part: Part, tmp_path: Path) -> None:
    said: list[str] = []
    start(part, tmp_path, said.append, Console(file=io.StringIO()))
    assert said[0] == "starting vLLM"
    assert any(line.startswith("starting vLLM, ") and line.endswith(" s: starting the engine") for line in said)
    assert said[-1].startswith("vLLM is ready after ") and said[-1].endswith(" s")
    assert len(said) == len(set(said)) <= len(PHASES) + 3
    assert not any("\x1b" in line or "\r" in line for line in said)


def test_on_a_terminal_the_phase_and_the_seconds_are_one_line_that_changes(part: Part, tmp_path: Path) -> None:
    said: list[str] = []
    screen = io.StringIO()
    start(part, tmp_path, said.append, Console(file=screen, force_terminal=True, width=100))
    assert len(said) == 1 and said[0].startswith("vLLM is ready after ")
    assert "starting vLLM" in screen.getvalue() and " s: starting the engine" in screen.getvalue()


def test_a_phase_that_lasts_is_told_again_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whetstone.terminal.progress.PLAIN_EVERY_S", 0.6)
    said: list[str] = []
    with show_progress(said.append, None, "starting vLLM", "done", lambda: "downloading the model") as look:
        deadline = time.monotonic() + 60
        while len(said) < 3 and time.monotonic() < deadline:
            look()
            time.sleep(0.05)
    assert [line.endswith("downloading the model") for line in said] == [False, True, True, False]


def test_a_start_that_fails_is_not_said_to_be_ready() -> None:
    said: list[str] = []
    with pytest.raises(KeyError), show_progress(said.append, None, "starting vLLM", "vLLM is ready"):
        raise KeyError
    assert said == ["starting vLLM"]


def test_an_estimate_is_shown_at_the_start_and_in_each_line() -> None:
    lines: list[str] = []
    with show_progress(lines.append, None, "starting vLLM", "vLLM is ready", lambda: "warming up", 71.2) as look:
        deadline = time.monotonic() + 60
        while len(lines) < 2 and time.monotonic() < deadline:
            look()
            time.sleep(0.05)
    begin, line, end = lines
    assert begin == "starting vLLM, about 71 s, as the last time" and end.startswith("vLLM is ready after")
    assert re.fullmatch(r"starting vLLM, \d s of about 71 s: warming up", line)
