"""Two hosts without a shared folder, and the balancer before them."""

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.fakes.json_server import Handler, Server
from benchmarks.faults.hosts.balancer import Address, Balancer
from benchmarks.kit.process import await_true

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.long(part="store")
def test_two_hosts_without_a_shared_folder_serve_and_train_and_one_can_be_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.faults.hosts", "--data", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1780, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


class NameServer(Server):
    """Answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(_Handler)

    @property
    def address(self) -> Address:
        split = urlsplit(self.url)
        assert split.hostname is not None and split.port is not None
        return split.hostname, split.port


class _Handler(Handler):
    server: NameServer

    def respond(self, body: dict[str, object]) -> None:
        self.whole(200, {"name": self.server.name})


@pytest.fixture
def proxies() -> Iterator[list[NameServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(NameServer(name)) for name in ("a", "b")]


def ask(connection: http.client.HTTPConnection) -> str:
    connection.request("POST", "/", "{}")
    return connection.getresponse().read().decode()


def test_connections_go_to_the_proxies_in_turns_and_are_counted(proxies: list[NameServer]) -> None:
    balancer = Balancer([proxy.address for proxy in proxies])
    with balancer.running():
        port = urlsplit(balancer.url).port
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=10) for _ in range(4)]
        assert sorted('"a"' in ask(one) for one in connections) == [False, False, True, True]
        assert [balancer.connections(proxy.address) for proxy in proxies] == [2, 2]
        for one in connections:
            one.close()
        for proxy in proxies:
            await_true(lambda proxy=proxy: balancer.connections(proxy.address) == 0, "all are closed", 10)


def test_a_proxy_that_cannot_be_reached_is_left_out(proxies: list[NameServer]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        balancer = Balancer([closed.getsockname(), proxies[0].address])
        with balancer.running():
            port = urlsplit(balancer.url).port
            for _ in range(3):
                assert '"a"' in ask(http.client.HTTPConnection("127.0.0.1", port, timeout=10))
