"""The proxy as a process: what stops its start, and what ends it later."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.unit.proxy.conftest import STREAM, FakeVllm, RunningProxy, own_process, settings_for, wait_for
from whetstone.config.settings import Settings

pytestmark = pytest.mark.slow


def started(*, files: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m proxy` with these settings, where so many files may be open; it is to end by itself."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return subprocess.run(
        [sys.executable, "-m", "proxy"],
        env={**os.environ, "WHETSTONE_CONFIG": os.devnull, **environment},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("environment", "files", "told"),
    [
        ({"WHETSTONE_PROXY__MAX_CONECTIONS": "3"}, None, "did you mean 'proxy.max_connections'?"),
        ({"WHETSTONE_PROXY__MAX_CONNECTIONS": "900"}, 1000, "raise `ulimit -n`"),
        ({}, None, "setting vllm.urls"),
    ],
)
def test_what_cannot_be_stops_the_start_with_its_remedy(
    environment: dict[str, str], files: int | None, told: str
) -> None:
    ended = started(files=files, **environment)
    assert ended.returncode != 0
    assert told in ended.stderr


# On SIGUSR1 the thread that writes to SQL ends by an error as soon as it has something to do.
DEADLY = """
import ctypes, signal, threading

def end_writer(*_):
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "recorder"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(writer.ident), ctypes.py_object(SystemExit))

signal.signal(signal.SIGUSR1, end_writer)
"""


def test_a_proxy_whose_writer_died_ends_and_its_next_start_writes_what_it_answered(
    sqlite_url: str, tmp_path: Path, fake_vllm: FakeVllm, start: Callable[[Settings], RunningProxy]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DEADLY)
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path)
    answered: list[str] = []
    log = tmp_path / "proxy.log"
    with (
        log.open("wb") as stderr,
        own_process(settings, log=stderr, PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), str(Path.cwd())])) as (
            url,
            process,
        ),
        httpx.Client(base_url=url, trust_env=False, verify=False) as app,
    ):
        process.send_signal(signal.SIGUSR1)

        def ended() -> bool:
            try:
                answer = app.post("/v1/chat/completions", json=STREAM | {"stream": False})
            except httpx.TransportError:
                return process.poll() is not None
            assert answer.status_code == 200
            answered.append(answer.headers["x-completion-id"])
            return False

        wait_for(ended)
        assert process.wait(timeout=60) == 1
    said = log.read_text()
    assert "the thread that writes to SQL ended by an error (SystemExit)" in said
    assert "Traceback" in said and "the proxy stops with exit code 1" in said
    assert answered
    rows = start(settings).recorded(len(answered))
    assert {row.id for row in rows} == set(answered)
