"""The agent of examples/langgraph sends what the plain agent of examples/mail sends, and earns the same."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import foreign_imports
from tests.examples.mail_player import MailPlayer
from whetstone.domain.conversation_hash import MessageReader

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = ROOT / ".venv-examples" / "bin" / "python"
"""An environment with langgraph and langchain-openai; `make test-all PART=examples` makes it."""
ENVIRONMENT = {"PATH": os.defpath, "LANGSMITH_TRACING": "false"}
APPS = {name: EXAMPLES / name / "app.py" for name in ("mail", "langgraph")}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what clients write in different ways: empty content, the spaces in arguments."""
    fields = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    for call in message.get("tool_calls", []):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = function["arguments"]
        fields.setdefault("calls", []).append([call["id"], function["name"], arguments])
    return fields


def attempts(app: Path, *flags: str, wrong_every: int = 0) -> tuple[MailPlayer, dict[str, Any]]:
    """Run an app against a server of its own, an attempt at a time; return what the server saw and the report."""
    with MailPlayer() as server:
        server.wrong_every = wrong_every
        fixed = ["--base-url", f"{server.url}/v1", "--connections", "1", "--temperature", "0", "--seed", "3"]
        command = [str(PYTHON), str(app), *fixed, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return server, report


@pytest.mark.long(part="examples")
@pytest.mark.slow
@pytest.mark.parametrize("wrong_every", [0, 4])
@pytest.mark.parametrize("flags", [("--size", "small"), ("--size", "full"), ("--size", "full", "--split", "eval")])
def test_both_agents_send_the_same_messages_and_earn_the_same(flags: tuple[str, ...], wrong_every: int) -> None:
    flags = (*flags, "--questions", "12", "--attempts", "2")
    plain_server, plain_report = attempts(APPS["mail"], *flags, wrong_every=wrong_every)
    graph_server, graph_report = attempts(APPS["langgraph"], *flags, wrong_every=wrong_every)
    reader = MessageReader()
    assert len(plain_server.bodies) == len(graph_server.bodies) >= 24
    for one, other in zip(plain_server.bodies, graph_server.bodies, strict=True):
        assert list(map(plain, one["messages"])) == list(map(plain, other["messages"]))
        assert reader.turns(one["messages"], None) == reader.turns(other["messages"], None)
        assert (one["model"], one["temperature"], one.get("tools")) == (
            other["model"],
            other["temperature"],
            other.get("tools"),
        )
        assert one["max_tokens"] == other["max_completion_tokens"]
    assert [posted["reward"] for posted in plain_server.feedback] == [
        posted["reward"] for posted in graph_server.feedback
    ]
    times = {"seconds": 0}
    assert plain_report | times == graph_report | times and plain_report["failed_requests"] == 0


@pytest.mark.long(part="examples")
@pytest.mark.slow
def test_both_agents_send_the_headers_of_their_attempts() -> None:
    flags = ("--questions", "8", "--attempts", "4")
    for app in APPS.values():
        server, _ = attempts(app, *flags)
        groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
        assert len(groups) == 8 and len(set(groups.values())) == 2
        assert {headers["x-split"] for headers in server.headers_seen} == {"train"}
        assert [posted["trajectory_id"] for posted in server.feedback] == list(groups)


def test_the_graph_imports_nothing_of_ours_and_uses_the_world_of_the_mail_example() -> None:
    assert len(APPS["langgraph"].read_text().splitlines()) <= 100
    own = {"episodes", "full_mail", "small_mail", "inbox"}
    assert foreign_imports(APPS["langgraph"]) == own | {"langchain_core", "langchain_openai", "langgraph"}
