"""The proxy as a process: what stops its start."""

import os
import resource
import subprocess
import sys

import pytest

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
