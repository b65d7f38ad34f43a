"""The rules, the opponent and the agent of the demo, the agent against a small server on a real socket."""

import importlib.util
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples.conftest import FakeOpenAI, command, foreign_imports, run

FOLDER = Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"
AGENT = FOLDER / "agent.py"


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
    assert len(AGENT.read_text().splitlines()) < 110
    assert foreign_imports(AGENT) == {"game", "openai"}


class Table(FakeOpenAI):
    """Always takes the lowest free cell."""

    @property
    def rewards(self) -> dict[str | None, float]:
        """Of each trajectory the last that was posted."""
        return {one.get("trajectory_id"): one["reward"] for one in self.feedback}

    def say(self, number: int, board: str) -> str:
        return str(game.free(board)[0])


@pytest.fixture
def table() -> Iterator[Table]:
    with Table() as table:
        yield table


@pytest.mark.slow
@pytest.mark.parametrize(("split", "tags"), [("train", set()), ("eval", {"x-split"})])
def test_untagged_it_says_nothing_but_that_a_game_is_held_out(table: Table, split: str, tags: set[str]) -> None:
    figures = run(AGENT, table, "--games", "8", "--untagged", "--split", split)
    ours = {"x-trajectory-id", "x-group-id", "x-task", "x-split"}
    assert {name for headers in table.headers_seen for name in headers} & ours == tags
    answers = {f"chatcmpl-{number + 1}" for number in range(len(table.headers_seen))}
    assert {one["completion_id"] for one in table.feedback} <= answers
    assert all(one["final"] is True for one in table.feedback)
    assert sum(one["reward"] for one in table.feedback) == figures["wins"]
    assert len(table.feedback) == figures["games"] == 8


@pytest.mark.slow
def test_a_run_plays_its_games_and_posts_one_reward_for_each(table: Table) -> None:
    figures = run(AGENT, table, "--games", "24", "--group-size", "8", "--run", "r")
    assert figures["games"] == 24 == figures["wins"] + figures["draws"] + figures["losses"]
    assert figures["failed_requests"] == figures["illegal"] == 0
    assert figures["requests"] == len(table.headers_seen) + 24
    assert set(table.rewards) == {f"r.train.{number}" for number in range(24)}
    assert sum(table.rewards.values()) == figures["wins"]
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in table.headers_seen}
    assert Counter(groups.values()) == {"r.0": 8, "r.1": 8, "r.2": 8}
    assert {headers["x-split"] for headers in table.headers_seen} == {"train"}


@pytest.mark.slow
def test_the_same_seed_plays_the_same_held_out_openings(table: Table) -> None:
    first, second = (run(AGENT, table, "--games", "30", "--split", "eval", "--seed", "3") for _ in range(2))
    assert first["won"] == second["won"] and len(first["won"]) == 30 and sum(first["won"]) == first["wins"]
    assert len(table.rewards) == 60, "ids of two runs on one database do not collide"
    assert all("x-group-id" not in headers for headers in table.headers_seen)


@pytest.mark.slow
def test_a_failed_request_is_counted_and_ends_only_its_game(table: Table) -> None:
    table.refused = 3
    figures = run(AGENT, table, "--games", "16", "--split", "eval")
    assert (figures["failed_requests"], figures["games"], len(figures["won"])) == (3, 13, 16)
    assert len(table.rewards) == 13


@pytest.mark.long(part="exact")
@pytest.mark.slow
def test_shuffled_rewards_keep_their_distribution_and_say_nothing_about_the_game(table: Table) -> None:
    figures = run(AGENT, table, "--games", "320", "--shuffle-rewards", "--run", "r")
    posted = [table.rewards[f"r.train.{number}"] for number in range(320)]
    assert sum(posted) / 320 == pytest.approx(figures["wins"] / 320, abs=0.12)
    mixed = [group for group in range(40) if 0 < sum(posted[group * 8 : group * 8 + 8]) < 8]
    assert len(mixed) > 30, "this server plays alike in a group, so only other groups' rewards differ within one"


@pytest.mark.slow
def test_sigterm_finishes_the_games_in_flight_and_exits_0(table: Table) -> None:
    with subprocess.Popen(command(AGENT, table, "--games", "0"), stdout=subprocess.PIPE, text=True) as agent:
        while len(table.rewards) < 5:
            assert agent.poll() is None
        agent.terminate()
        output, _ = agent.communicate(timeout=120)
    figures = json.loads(output.splitlines()[-1])
    assert agent.returncode == 0
    assert figures["games"] == len(table.rewards) >= 5 and figures["failed_requests"] == 0
