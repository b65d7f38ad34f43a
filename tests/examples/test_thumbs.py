"""The questions and the app of examples/thumbs, the app against a small server on a real socket."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.conftest import FakeOpenAI, foreign_imports, run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "thumbs"
APP = FOLDER / "app.py"
sys.path.insert(0, str(FOLDER))

import hints  # noqa: E402


def test_no_held_out_board_is_ever_trained_on() -> None:
    train, held_out = hints.boards()["train"], hints.boards()["eval"]
    assert (len(set(train)), len(set(held_out))) == (len(train), len(held_out)) == (3034, 600)
    assert not set(train) & set(held_out)
    assert {hints.question("train", seed, number) for seed in (0, 1) for number in range(5000)} <= set(train)
    assert [hints.question("eval", 9, number) for number in range(600)] == held_out


def test_the_same_seed_asks_the_same_questions() -> None:
    first, again, other = ([hints.question("train", seed, number) for number in range(50)] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("board", "liked"),
    [
        ("123456789", {"5"}),
        ("1234O6789", {"1", "3", "7", "9"}),
        ("O234X6789", {"3", "6", "7", "8", "9"}),
        ("1X3OO678X", {"3"}),
    ],
)
def test_users_like_the_cell_that_keeps_most_lines_open(board: str, liked: set[str]) -> None:
    assert hints.liked(board) == liked


def test_every_question_has_an_answer_that_is_liked_and_one_that_is_not() -> None:
    shares = [len(hints.liked(board)) / len(hints.game.free(board)) for board in hints.boards()["eval"]]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) / len(shares) == pytest.approx(0.444, abs=0.001)  # a random legal answer


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) < 110
    assert foreign_imports(APP) == {"hints", "openai"}


class Server(FakeOpenAI):
    """Half of its answers are cells that users like."""

    def __init__(self) -> None:
        self.answers: dict[str, bool] = {}
        super().__init__()

    def say(self, number: int, board: str) -> str:
        right = random.Random(number).random() < 0.5
        self.answers[f"chatcmpl-{number}"] = right
        return min(hints.liked(board) if right else set(hints.game.free(board)) - hints.liked(board))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_three_answers_in_ten_get_the_thumb_they_deserve_and_no_request_says_more_than_the_question(
    server: Server,
) -> None:
    report = run(APP, server, "--questions", "400")
    assert (report["questions"], report["failed_requests"], len(server.answers)) == (400, 0, 400)
    assert report["liked"] == sum(server.answers.values())
    assert report["thumbs"] == len(server.feedback) == pytest.approx(120, abs=40)
    for thumb in server.feedback:
        up = server.answers[thumb["completion_id"]]
        assert thumb == {"completion_id": thumb["completion_id"], "thumbs": "up" if up else "down", "final": True}
    ours = ("x-trajectory-id", "x-group-id", "x-task", "x-split", "x-metadata")
    assert not any(name in headers for headers in server.headers_seen for name in ours)


@pytest.mark.slow
def test_held_out_questions_are_marked_and_get_no_thumb(server: Server) -> None:
    report = run(APP, server, "--questions", "60", "--split", "eval")
    assert len(report["each"]) == 60 and sum(report["each"]) == report["liked"]
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert server.feedback == []


@pytest.mark.long(part="exact")
@pytest.mark.slow
def test_shuffled_thumbs_keep_their_share_and_say_nothing(server: Server) -> None:
    run(APP, server, "--questions", "600", "--thumbs", "1", "--shuffle-rewards")
    ups = [thumb["thumbs"] == "up" for thumb in server.feedback]
    right = [server.answers[thumb["completion_id"]] for thumb in server.feedback]
    assert sum(ups) / 600 == pytest.approx(sum(right) / 600, abs=0.12)
    assert sum(up == is_right for up, is_right in zip(ups, right, strict=True)) / 600 == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_a_failed_request_is_counted_and_not_repeated(server: Server) -> None:
    server.refused = 3
    report = run(APP, server, "--questions", "20", "--split", "eval")
    assert (report["failed_requests"], report["questions"], len(report["each"])) == (3, 17, 20)
    assert len(server.headers_seen) == 20
