"""The rules, the opponent and the agent of examples/tictactoe, the agent against a small server on a real socket."""

import ast
import importlib.util
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tictactoe"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


game = load(FOLDER / "game.py")


def win_share(choose: Any) -> float:
    """The exact probability of winning against a uniform opponent who opens half of the games."""

    @cache
    def value(board: str, agent_moves: bool) -> float:
        ended = game.result(board)
        if ended is not None:
            return float(ended == "X")
        mark = "X" if agent_moves else "O"
        values = [value(game.place(board, cell, mark), not agent_moves) for cell in game.free(board)]
        return float(choose(values)) if agent_moves else sum(values) / len(values)

    return (value(game.EMPTY, True) + value(game.EMPTY, False)) / 2


def test_random_play_wins_43_7_percent_and_perfect_play_96_7() -> None:
    assert win_share(lambda values: sum(values) / len(values)) == pytest.approx(0.437, abs=0.0005)
    assert win_share(max) == pytest.approx(0.967, abs=0.0005)


@pytest.mark.parametrize(
    ("board", "result"),
    [
        ("123456789", None),
        ("XXX45OO89", "X"),
        ("1O3XOX7O9", "O"),
        ("X2O4XO78X", "X"),
        ("X2O4O6OX9", "O"),
        ("XOXXOOOXX", "draw"),
        ("XOXXOOOX9", None),
    ],
)
def test_three_in_a_line_win_and_a_full_board_is_a_draw(board: str, result: str | None) -> None:
    assert game.result(board) == result


def test_a_legal_move_is_a_character_that_is_there_to_be_copied() -> None:
    assert game.free("1X34O67XO") == list("13467")
    assert game.place("1X34O67XO", "4", "X") == "1X3XO67XO"


def test_the_opponent_is_fixed_by_opening_and_board_and_uniform_over_openings() -> None:
    replies = Counter(game.reply("1X3456789", f"train:0:{number}") for number in range(8000))
    assert game.reply("1X3456789", "train:0:1") == game.reply("1X3456789", "train:0:1")
    assert len(replies) == 8
    assert all(850 < times < 1150 for times in replies.values())


def test_the_opponent_opens_half_of_the_games() -> None:
    boards = [game.first_board(number, game.opening_name("train", 0, number)) for number in range(100)]
    assert [board.count("O") for board in boards] == [0, 1] * 50


def test_training_and_held_out_openings_never_share_a_name() -> None:
    names = {split: {game.opening_name(split, 0, number) for number in range(500)} for split in ("train", "eval")}
    assert not names["train"] & names["eval"]


def test_a_finished_game_gets_no_reply() -> None:
    assert game.after("XX3OO6789", "3", "train:0:0") == "XXXOO6789"
    assert game.after("XX3OO6789", "9", "train:0:0").count("O") == 3


def test_the_agent_is_short_and_imports_nothing_of_ours() -> None:
    text = (FOLDER / "agent.py").read_text()
    assert len(text.splitlines()) < 105
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"game", "openai"}


class Table(ThreadingHTTPServer):
    """Speaks the OpenAI wire and always takes the lowest free cell. Remembers what was posted; may refuse at first."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.headers_seen: dict[str, dict[str, str]] = {}
        self.rewards: dict[str | None, float] = {}
        self.feedback: list[dict[str, Any]] = []
        self.refused = 0
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Table

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/feedback":
            self.server.feedback.append(body)
            self.server.rewards[body.get("trajectory_id")] = body["reward"]
            self.send(202, {"id": "feedback"})
            return
        self.server.asked += 1
        if self.server.asked <= self.server.refused:
            self.send(503, {"error": {"message": "not yet"}})
            return
        self.server.headers_seen[self.headers["X-Trajectory-Id"] or f"untagged {self.server.asked}"] = {
            name.title(): value for name, value in self.headers.items()
        }
        message = {"role": "assistant", "content": game.free(body["messages"][-1]["content"])[0]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.send(200, {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})

    def send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read what was posted."""


@pytest.fixture
def table() -> Iterator[Table]:
    server = Table()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run_agent(table: Table, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / "agent.py"), "--base-url", table.url, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(("split", "tags"), [("train", set()), ("eval", {"X-Split"})])
def test_untagged_it_says_nothing_but_that_a_game_is_held_out(table: Table, split: str, tags: set[str]) -> None:
    figures = run_agent(table, "--games", "8", "--untagged", "--split", split)
    ours = {"X-Trajectory-Id", "X-Group-Id", "X-Task", "X-Split"}
    assert {name for headers in table.headers_seen.values() for name in headers} & ours == tags
    assert {(one["completion_id"], one["final"]) for one in table.feedback} == {("c", True)}
    assert sum(one["reward"] for one in table.feedback) == figures["wins"]
    assert len(table.feedback) == figures["games"] == 8


@pytest.mark.slow
def test_a_run_plays_its_games_and_posts_one_reward_for_each(table: Table) -> None:
    figures = run_agent(table, "--games", "24", "--group-size", "8", "--run", "r")
    assert figures["games"] == 24 == figures["wins"] + figures["draws"] + figures["losses"]
    assert figures["failed_requests"] == figures["illegal"] == 0
    assert figures["requests"] == table.asked + 24
    assert set(table.rewards) == {f"r.train.{number}" for number in range(24)}
    assert sum(table.rewards.values()) == figures["wins"]
    groups = Counter(headers["X-Group-Id"] for headers in table.headers_seen.values())
    assert groups == {"r.0": 8, "r.1": 8, "r.2": 8}
    assert {headers["X-Split"] for headers in table.headers_seen.values()} == {"train"}


@pytest.mark.slow
def test_the_same_seed_plays_the_same_held_out_openings(table: Table) -> None:
    first, second = (run_agent(table, "--games", "30", "--split", "eval", "--seed", "3") for _ in range(2))
    assert first["won"] == second["won"] and len(first["won"]) == 30 and sum(first["won"]) == first["wins"]
    assert len(table.rewards) == 60, "ids of two runs on one database do not collide"
    assert all("X-Group-Id" not in headers for headers in table.headers_seen.values())


@pytest.mark.slow
def test_a_failed_request_is_counted_and_ends_only_its_game(table: Table) -> None:
    table.refused = 3
    figures = run_agent(table, "--games", "16", "--split", "eval")
    assert (figures["failed_requests"], figures["games"], len(figures["won"])) == (3, 13, 16)
    assert len(table.rewards) == 13


@pytest.mark.slow
def test_shuffled_rewards_keep_their_distribution_and_say_nothing_about_the_game(table: Table) -> None:
    figures = run_agent(table, "--games", "320", "--shuffle-rewards", "--run", "r")
    posted = [table.rewards[f"r.train.{number}"] for number in range(320)]
    assert sum(posted) / 320 == pytest.approx(figures["wins"] / 320, abs=0.12)
    mixed = [group for group in range(40) if 0 < sum(posted[group * 8 : group * 8 + 8]) < 8]
    assert len(mixed) > 30, "this server plays alike in a group, so only other groups' rewards differ within one"


@pytest.mark.slow
def test_sigterm_finishes_the_games_in_flight_and_exits_0(table: Table) -> None:
    command = [sys.executable, str(FOLDER / "agent.py"), "--base-url", table.url, "--games", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        while len(table.rewards) < 5:
            assert agent.poll() is None
        agent.terminate()
        output, _ = agent.communicate(timeout=120)
    figures = json.loads(output.splitlines()[-1])
    assert agent.returncode == 0
    assert figures["games"] == len(table.rewards) >= 5 and figures["failed_requests"] == 0
