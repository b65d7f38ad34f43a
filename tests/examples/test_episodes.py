"""The loop that the examples share: groups, roles, rewards, the control, a judge, and how it stops."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler
from tests.examples.conftest import FakeOpenAI, command, foreign_imports, run

LOOP = Path(__file__).resolve().parents[2] / "examples" / "episodes.py"
APP = f"""
import sys

sys.path.insert(0, {str(LOOP.parent)!r})

import episodes


async def play(attempt):
    world = attempt.rng().randrange(1000)
    messages = [{{"role": "user", "content": str(world)}}]
    for role in attempt.args.roles:
        await attempt.ask(messages, role, max_tokens=4)
    right = messages[-1]["content"] == "yes"
    rewards = {{role: float(right) for role in attempt.args.roles}}
    return episodes.Result(rewards if attempt.args.roles != [""] else float(right), right, share=0.5)


parser = episodes.parser_of("An app.")
parser.add_argument("--roles", nargs="+", default=[""])
episodes.main(parser, play)
"""


class Server(FakeOpenAI):
    """Every second answer is right; records the paths and bodies of everything else."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        super().__init__()
        self.RequestHandlerClass = Recording

    def say(self, number: int, board: str) -> str:
        return "yes" if number % 2 else "no"


class Recording(Handler):
    server: Server

    def respond(self, body: dict[str, Any]) -> None:
        if self.path.endswith("/chat/completions"):
            with self.server.lock:
                self.server.headers_seen.append({name.lower(): value for name, value in self.headers.items()})
                number = len(self.server.headers_seen)
            refused = number <= self.server.refused
            self.whole(503 if refused else 200, self.server.answer(number, body))
            return
        with self.server.lock:
            self.server.posted.append((self.path.removeprefix("/v1"), body))
        self.whole(202, {"id": "feedback"})


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP)
    return path


pytestmark = pytest.mark.slow


def test_the_loop_knows_only_the_stock_client() -> None:
    assert foreign_imports(LOOP) == {"openai"}


def test_attempts_at_a_task_are_a_group_of_known_size_and_each_gets_its_reward(app: Path, server: Server) -> None:
    report = run(app, server, "--questions", "24", "--attempts", "8", "--connections", "4")
    assert (report["questions"], report["solved"], report["failed_requests"]) == (24, 12, 0)
    assert report["reward"] == 0.5 and "each" not in report
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {8: 3}
    assert {headers["x-group-size"] for headers in server.headers_seen} == {"8"}
    rewards = {body["trajectory_id"]: body["reward"] for path, body in server.posted if path == "/feedback"}
    assert rewards.keys() == groups.keys() and Counter(rewards.values()) == {0.0: 12, 1.0: 12}


def test_each_role_is_a_trajectory_in_a_group_of_its_own(app: Path, server: Server) -> None:
    run(app, server, "--questions", "8", "--attempts", "4", "--roles", "giver", "guesser")
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert len(groups) == 16 and Counter(Counter(groups.values()).values()) == {4: 4}
    assert {name.rpartition(".")[2] for name in groups} == {"giver", "guesser"}
    assert {body["trajectory_id"] for _, body in server.posted} == set(groups)


def test_held_out_attempts_are_marked_and_get_no_reward(app: Path, server: Server) -> None:
    report = run(app, server, "--questions", "10", "--split", "eval", "--connections", "1")
    assert report["each"] == [1, 0] * 5 and report["fields"] == [0.5] * 10
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert not any("x-group-id" in headers for headers in server.headers_seen) and server.posted == []


def test_a_failed_call_ends_its_attempt_and_is_counted(app: Path, server: Server) -> None:
    server.refused = 3
    report = run(app, server, "--questions", "8", "--connections", "1")
    assert (report["questions"], report["failed_requests"]) == (5, 3)
    assert len(server.posted) == 5


def test_a_judge_ranks_a_group_when_all_its_attempts_have_ended(app: Path, server: Server) -> None:
    run(app, server, "--questions", "8", "--attempts", "4", "--judge", "--connections", "2")
    ends = [path for path, _ in server.posted if path.endswith("/end")]
    ranked = [body for path, body in server.posted if path == "/feedback"]
    assert len(ends) == 8 and len(ranked) == 2
    assert {json.dumps(body["judge"]) for body in ranked} == {'{"kind": "ruler"}'}
    assert {body["group_id"] for body in ranked} == {headers["x-group-id"] for headers in server.headers_seen}


def test_the_control_posts_rewards_of_other_tasks(app: Path, server: Server) -> None:
    run(app, server, "--questions", "160", "--attempts", "8", "--shuffle-rewards", "--connections", "1")
    own = [float(number % 2) for number in range(1, 161)]
    posted = [body["reward"] for _, body in server.posted]
    same = sum(a == b for a, b in zip(own, posted, strict=True))
    assert 50 < same < 110 and 50 < sum(posted) < 110


def test_a_stop_completes_the_groups_that_have_begun(app: Path, server: Server) -> None:
    with subprocess.Popen(
        command(app, server, "--questions", "0", "--attempts", "8", "--connections", "3", "--pause-s", "0.01"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while len(server.headers_seen) < 11:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    report = json.loads(output.splitlines()[-1])
    assert report["questions"] % 8 == 0 and report["questions"] == len(server.posted) >= 16


def test_a_judge_without_groups_is_refused(app: Path, server: Server) -> None:
    done = subprocess.run(
        command(app, server, "--judge", "--attempts", "1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "give --attempts 2 or more" in done.stderr
