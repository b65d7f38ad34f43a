"""The board and the app of examples/2048, the app against scripted players on a real socket; the novice's boards."""

import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.examples.conftest import FakeOpenAI, foreign_imports, run
from whetstone.config.settings import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDER = EXAMPLES / "2048"
APP = FOLDER / "app.py"
sys.path[:0] = [str(EXAMPLES), str(FOLDER), str(EXAMPLES / "novice")]

import board_2048  # noqa: E402
import episodes  # noqa: E402
import tiles  # noqa: E402

SMALL, FULL = tiles.FORMS["small"], tiles.FORMS["full"]
TASKS = 400
CLIENT = AsyncOpenAI(api_key="none")


def game(task: int, split: str = "train", seed: int = 0, form: tiles.Form = SMALL) -> tiles.Game:
    """Return a game as the app starts it for the first attempt at a task."""
    args = Namespace(split=split, seed=seed, attempts=1)
    attempt = episodes.Attempt(args, CLIENT, "run", task)
    return tiles.Game(form, split, attempt.rng)


def played(task: int, choose: Any, **options: Any) -> tiles.Game:
    """Return a task's game at its end; `choose` picks one of the legal moves."""
    game_ = game(task, **options)
    while not game_.over:
        assert game_.move(choose(tiles.legal_moves(game_.board)))
    return game_


def first(moves: list[str]) -> str:
    return moves[0]


def by_order(moves: list[str]) -> str:
    return min(moves, key=["down", "left", "right", "up"].index)


@pytest.mark.parametrize(
    ("row", "left", "right"),
    [
        ((1, 1, 1, 1), (2, 2, 0, 0), (0, 0, 2, 2)),
        ((1, 1, 2, 0), (2, 2, 0, 0), (0, 0, 2, 2)),
        ((2, 0, 0, 2), (3, 0, 0, 0), (0, 0, 0, 3)),
        ((1, 1, 1, 0), (2, 1, 0, 0), (0, 0, 1, 2)),
        ((3, 1, 0, 0), (3, 1, 0, 0), (0, 0, 3, 1)),
        ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    ],
)
def test_tiles_slide_and_merge_once(row: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert tiles.slid((row,), "left") == (left,) and tiles.slid((row,), "right") == (right,)
    column = tuple((tile,) for tile in row)
    assert tiles.slid(column, "up") == tuple((tile,) for tile in left)
    assert tiles.slid(column, "down") == tuple((tile,) for tile in right)


def test_a_move_is_legal_if_it_changes_the_board() -> None:
    assert tiles.legal_moves(((1, 2, 0), (0, 0, 0))) == ["down", "right"]
    assert tiles.legal_moves(((1, 1), (2, 3))) == ["left", "right"]
    assert tiles.legal_moves(((1, 2), (2, 1))) == []


def test_no_start_is_in_both_splits_and_each_has_the_tiles_of_its_form() -> None:
    for form in (SMALL, FULL):
        starts = {split: {game(task, split, form=form).board for task in range(TASKS)} for split in ("train", "eval")}
        assert not starts["train"] & starts["eval"]
        for board in starts["train"] | starts["eval"]:
            cells = [tile for row in board for tile in row]
            assert sorted(filter(None, cells), reverse=True) == list(form.start)
            assert (len(board), len(cells)) == (form.rows, form.rows * form.columns)
        assert min(map(len, starts.values())) >= (200 if form is SMALL else 10)


def test_a_seed_gives_the_same_tasks_and_those_of_eval_are_the_same_for_any() -> None:
    one, again, other = ([game(task, seed=seed).board for task in range(50)] for seed in (0, 0, 1))
    assert one == again != other
    assert played(7, first, split="eval").board == played(7, first, split="eval", seed=1).board


def test_the_same_moves_meet_the_same_tiles_and_another_move_the_same_luck() -> None:
    assert played(3, first).board == played(3, first).board != played(3, by_order).board
    draw = random.Random(0).random
    luck = [draw(), draw()]
    for board in (((0, 1), (1, 0)), ((1, 1), (0, 0))):
        empty = [(i, j) for i, row in enumerate(board) for j, tile in enumerate(row) if not tile]
        row, column = empty[int(luck[0] * 2)]
        assert tiles.with_tile(board, random.Random(0))[row][column] == (2 if luck[1] < 0.1 else 1)


def test_a_tenth_of_the_new_tiles_are_fours() -> None:
    rng, empty = random.Random(0), ((0, 0, 0), (0, 0, 0))
    drawn = Counter(tile for _ in range(3000) for row in tiles.with_tile(empty, rng) for tile in row if tile)
    assert set(drawn) == {1, 2} and 240 < drawn[2] < 360


def test_what_a_game_is_worth() -> None:
    game_ = game(0)
    assert game_.largest == 4 and not game_.won
    assert game_.share == pytest.approx((4 / 5 + 0.8479) / 2, abs=1e-4)  # log2(16 + 8 + 4 + 4 + 2) is 5.087, of 6
    game_.board = ((4, 4, 0, 0), (1, 0, 0, 0))
    assert not game_.move("north") and game_.moves == 0
    assert game_.move("left")
    assert game_.board == ((5, 0, 0, 0), (1, 0, 0, 0)), "no tile comes after the last move"
    assert (game_.won, game_.over, game_.share) == (True, True, 1.0)
    game_.board = ((1, 2, 1, 2), (2, 1, 2, 1))
    assert game_.over and not game_.won


def test_what_the_model_sees() -> None:
    board = ((4, 3, 0, 0), (0, 1, 2, 2))
    assert SMALL.system() == "Slide and merge. Reach 5."
    assert SMALL.text(board) == "4300\n0122\nup down left right"
    assert FULL.text(board) == "16 8 . .\n. 2 4 4\nMoves: up, down, left, right"
    assert "Reach the tile 2048." in FULL.system()


@pytest.mark.parametrize(
    ("answer", "move"), [("up", "up"), (" Left.\n", "left"), ("The corner is full, so: **down**", "down"), ("7", "")]
)
def test_the_move_is_the_last_word_of_an_answer(answer: str, move: str) -> None:
    assert tiles.move_in(answer) == move


def test_a_fixed_order_of_moves_wins_far_more_often_than_random_play() -> None:
    rng = random.Random(0)
    won = [sum(played(task, choose, split="eval").won for task in range(TASKS)) for choose in (rng.choice, by_order)]
    assert 0.4 * TASKS < won[0] < 0.6 * TASKS and won[1] > 0.75 * TASKS


def test_the_novice_sees_boards_that_start_no_game_and_every_legal_move_as_often() -> None:
    rng, start = random.Random(0), sorted(SMALL.start)
    expected: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for _ in range(2000):
        conversation = board_2048.conversation(rng)
        (system, user, answer), (moves,) = conversation.messages, conversation.choices
        *rows, listed = user["content"].splitlines()
        board = tuple(tuple(map(int, row)) for row in rows)
        assert system["content"] == SMALL.system() and SMALL.text(board) == user["content"]
        assert moves == tiles.legal_moves(board) == listed.split() and answer["content"] in moves
        assert sorted(int(cell) for cell in "".join(rows) if cell != "0") != start
        answers[answer["content"]] += 1
        for move in moves:
            expected[move] += 1 / len(moves)
    assert {move: pytest.approx(count, rel=0.1) for move, count in expected.items()} == answers
    assert set(tiles.MOVES) < set(board_2048.WORDS)


def test_the_settings_for_a_gpu_are_settings() -> None:
    settings = load(FOLDER / "gpu.toml", environment={})
    assert settings.policy == "player"


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 150
    assert foreign_imports(APP) == {"episodes", "tiles"}


class Server(FakeOpenAI):
    """Plays the first move that is listed."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        super().__init__()

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.lengths.add(len(body["messages"]))
        return super().answer(number, body)

    def say(self, number: int, board: str) -> str:
        return board.splitlines()[-1].removeprefix("Moves: ").split()[0].strip(",")


class Stubborn(Server):
    """Plays one move, which is not always legal."""

    def say(self, number: int, board: str) -> str:
        return "up"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_attempts_at_a_task_are_a_group_and_each_gets_its_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "48", "--attempts", "8")
    games = [played(task, first) for task in range(6)]
    won = sum(game_.won for game_ in games)
    assert 0 < won < 6
    assert (report["questions"], report["solved"], report["failed_requests"]) == (48, 8 * won, 0)
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {8: 6}
    calls = Counter(headers["x-trajectory-id"] for headers in server.headers_seen)
    assert Counter(calls.values()) == Counter(game_.moves for game_ in games for _ in range(8))
    assert server.lengths == {2}, "each move is a conversation of its own"
    rewards = Counter(round(posted["reward"], 6) for posted in server.feedback)
    expected = [2.0 if game_.won else round(game_.share, 6) for game_ in games]
    assert rewards == Counter(reward for reward in expected for _ in range(8))


@pytest.mark.slow
def test_a_move_that_is_not_listed_ends_the_game() -> None:
    with Stubborn() as server:
        report = run(APP, server, "--questions", "40", "--attempts", "8")
    games = [game(task) for task in range(5)]
    for game_ in games:
        while not game_.over and game_.move("up"):
            pass
    expected = [2.0 if game_.won else game_.share if game_.over else -1.0 for game_ in games]
    assert expected.count(-1.0) >= 3 and report["failed_requests"] == 0
    assert sorted(posted["reward"] for posted in server.feedback) == sorted(expected * 8)


@pytest.mark.slow
def test_held_out_games_are_marked_and_get_no_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "30", "--split", "eval")
    assert report["each"] == [int(played(task, first, split="eval").won) for task in range(30)]
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert not any("x-group-id" in headers for headers in server.headers_seen) and server.feedback == []


@pytest.mark.slow
def test_the_full_board_and_another_target(server: Server) -> None:
    report = run(APP, server, "--questions", "4", "--attempts", "1", "--size", "full", "--target", "16")
    assert (report["solved"], report["reward"]) == (4, 2.0)
