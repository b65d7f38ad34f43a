"""SIGTERM and SIGINT to a proxy that is at work: what may end ends whole, what may not is recorded, nothing is lost."""

import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select

from migrations import schema
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, chunk, events, own_process, settings_for, wait_for
from whetstone.config.settings import Settings
from whetstone.database.engine import connect

pytestmark = pytest.mark.slow


class Slow:
    """A fake vLLM's answers: each begins at once; those to "short" end when they are let, the others never."""

    def __init__(self, fake: FakeVllm) -> None:
        self.go = threading.Event()
        fake.script = self

    def __call__(self, handler: FakeHandler, body: dict[str, Any]) -> None:
        first, *rest = events()
        handler.begin()
        for event in (first, chunk({"content": "now"}, token_ids=[7])):
            handler.say(event)
        if body["messages"][0]["content"] != "short":
            handler.until_hung_up()
            return
        assert self.go.wait(60)
        for event in rest:
            handler.say(event)
        handler.end()


class Client:
    """An app that has asked for a stream and heard its first words."""

    def __init__(self, url: str, words: str) -> None:
        address = urlsplit(url)
        body = json.dumps(
            {"model": "starter", "stream": True, "messages": [{"role": "user", "content": words}]}
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._socket = socket.create_connection((address.hostname, address.port), timeout=60)
        self._socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.heard = b""
        while b"now" not in self.heard:
            self.heard += self._socket.recv(65536)

    def to_the_end(self) -> bytes:
        with self._socket:
            while data := self._socket.recv(65536):
                self.heard += data
        return self.heard


def refused(url: str) -> bool:
    """Nobody listens there any more: a connection that is reset or hangs was still in the queue of one who did."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except (ConnectionResetError, TimeoutError):
        pass
    return False


def statuses(settings: Settings) -> list[str]:
    engine = connect(settings.database_url)
    with engine.begin() as connection:
        found = list(connection.scalars(select(schema.completions.c.status)))
    engine.dispose()
    return sorted(found)


def stopped_in_order(process: subprocess.Popen[bytes], settings: Settings) -> bool:
    """It ended with 0, within a minute, and all that was said is in SQL."""
    return process.wait(60) == 0 and list((settings.data / "journal").iterdir()) == []


def the_settings(database_url: str, fake: FakeVllm, data: Path, drain_timeout_s: float) -> Settings:
    return settings_for(database_url, fake.url, data, proxy={"drain_timeout_s": drain_timeout_s})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_may_end_and_the_others_are_recorded_as_aborted(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, number: signal.Signals
) -> None:
    upstream, settings = Slow(fake_vllm), the_settings(sqlite_url, fake_vllm, tmp_path, 3)
    with own_process(settings) as (url, process):
        short, long = Client(url, "short"), Client(url, "long")
        process.send_signal(number)
        assert wait_for(lambda: refused(url))
        upstream.go.set()
        assert short.to_the_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"[DONE]" not in long.to_the_end()
        assert fake_vllm.hung_up.wait(30)
        assert stopped_in_order(process, settings)
    assert statuses(settings) == ["aborted", "complete"]


def test_a_second_signal_hurries(sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path) -> None:
    Slow(fake_vllm)
    settings = the_settings(sqlite_url, fake_vllm, tmp_path, 3600)
    with own_process(settings) as (url, process):
        clients = [Client(url, "long") for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        assert wait_for(lambda: refused(url))
        process.send_signal(signal.SIGTERM)
        assert not any(b"[DONE]" in client.to_the_end() for client in clients)
        assert stopped_in_order(process, settings)
    assert statuses(settings) == ["aborted"] * 3


def test_an_idle_proxy_stops_at_once(sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path) -> None:
    settings = the_settings(sqlite_url, fake_vllm, tmp_path, 3600)
    with own_process(settings) as (url, process):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as idle:
            idle.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle.recv(65536).startswith(b"HTTP/1.1 200 OK")
            process.send_signal(signal.SIGTERM)
            assert stopped_in_order(process, settings)
