"""How many files a request passes: a walk that a reader can follow stays short."""

import logging
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = tuple(str(ROOT / name) + os.sep for name in ("proxy", "whetstone", "migrations"))
MOST_TO_THE_LAST_BYTE = 30
MOST_TO_SQL = 40
"""Files, as they are today (46 and 59 before the folders were made); only ever lower these."""
TRIES = 8
"""A file counts if every one of as many calls passes it: what runs beside them once a second does not."""


class FileTrace:
    """Collects the files of this product in which functions run, in all threads that start while it is installed."""

    def __init__(self) -> None:
        self.serving: set[str] = set()
        """Files that the thread passes which serves requests."""
        self.writing: set[str] = set()
        """Files that the thread passes which writes to SQL."""

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PROGRAMS):
            files = self.writing if threading.current_thread().name == "recorder" else self.serving
            files.add(name[len(str(ROOT)) + 1 :])


@pytest.fixture
def trace() -> Iterator[FileTrace]:
    """Installed for the threads that start from now on; a proxy's loop and its writer are such threads."""
    trace = FileTrace()
    threading.setprofile(trace)
    yield trace
    threading.setprofile(None)  # type: ignore[arg-type]  # as documented


def test_a_streamed_call_passes_few_files(
    trace: FileTrace, sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Any], RunningProxy],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)  # as by default: each call is a line
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path))
    to_the_last_byte, to_sql = [], []
    for number in range(TRIES + 1):
        messages = [{"role": "user", "content": f"question {number}"}]
        trace.serving, trace.writing = set(), set()
        with proxy.client.stream(
            "POST", "/v1/chat/completions", json={"model": "starter", "messages": messages, "stream": True}
        ) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        to_the_last_byte.append(set(trace.serving))
        proxy.recorded(number + 1)
        time.sleep(0.05)  # what follows the commit
        to_sql.append(set(trace.writing))
    # The first call also meets what is read once.
    walk = set.intersection(*to_the_last_byte[1:])
    whole = walk | set.intersection(*to_sql[1:])
    assert len(walk) > 20, "it looks at the wrong files"
    assert len(walk) <= MOST_TO_THE_LAST_BYTE, sorted(walk)
    assert len(whole) <= MOST_TO_SQL, sorted(whole - walk)
