"""examples/feedback.py: what it posts, how it takes a refusal, and that it is short."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server
from tests.examples.conftest import foreign_imports

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "feedback.py"


class Proxy(Server):
    """Takes feedback, or refuses it."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, str | None, Any]] = []
        self.refuses = False
        super().__init__(Answer)


class Answer(Handler):
    server: Proxy

    def respond(self, body: dict[str, Any]) -> None:
        self.server.posts.append((self.path, self.headers["authorization"], body))
        refusal = 400, {"error": {"message": "feedback needs exactly one of these"}}
        self.whole(*refusal if self.server.refuses else (202, {"id": "f1", "target": "known"}))


@pytest.fixture
def server() -> Iterator[Proxy]:
    with Proxy() as server:
        yield server


def run(server: Proxy | None, *flags: str, key: str = "") -> subprocess.CompletedProcess[str]:
    address = [] if server is None else ["--base-url", f"{server.url}/v1/"]
    environment = {**os.environ, "WHETSTONE_API_KEY": key}
    command = [sys.executable, str(SCRIPT), *flags, *address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (["c1", "--thumbs", "up"], {"completion_id": "c1", "thumbs": "up"}),
        (["c1", "--reward", "0", "--comment", "slow"], {"completion_id": "c1", "reward": 0.0, "comment": "slow"}),
        (["t1", "--trajectory", "--reward", "-1"], {"trajectory_id": "t1", "reward": -1.0}),
        (["c1", "--right-answer", "Paris"], {"completion_id": "c1", "demonstration": "Paris"}),
        (
            ["c1", "--thumbs", "down", "--right-answer", "Paris"],
            {"completion_id": "c1", "thumbs": "down", "demonstration": "Paris"},
        ),
    ],
)
def test_it_posts_what_its_flags_name(server: Proxy, flags: list[str], body: dict[str, Any]) -> None:
    done = run(server, *flags, key="wsk_k")
    assert done.returncode == 0 and "'target': 'known'" in done.stdout, done.stderr
    assert server.posts == [("/v1/feedback", "Bearer wsk_k", body)]


@pytest.mark.slow
def test_a_refusal_is_printed_and_fails(server: Proxy) -> None:
    server.refuses = True
    done = run(server, "c1", "--thumbs", "up")
    assert done.returncode == 1 and done.stderr.startswith("400: ") and "exactly one of these" in done.stderr
    assert server.posts[0][1] is None, "without a key, none is sent"


@pytest.mark.slow
def test_help_names_every_flag() -> None:
    done = run(None, "--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in ("--thumbs", "--reward", "--right-answer", "--trajectory", "--base-url"))


def test_it_is_short_typed_and_on_httpx_alone() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40
    assert foreign_imports(SCRIPT) == {"httpx"}
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert all(function.returns for function in functions)
    assert all(argument.annotation for function in functions for argument in function.args.args)
