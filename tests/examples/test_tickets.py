"""The tickets and the app of examples/tickets, the app against a small server on a real socket."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.conftest import FakeOpenAI, foreign_imports, run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tickets"
APP = FOLDER / "app.py"
sys.path.insert(0, str(FOLDER))

import tickets  # noqa: E402


def test_no_held_out_ticket_is_ever_trained_on() -> None:
    train = {tickets.ticket("train", seed, number)[0] for seed in (0, 1) for number in range(3000)}
    held_out = {tickets.ticket("eval", 0, number)[0] for number in range(600)}
    assert not train & held_out
    sentences = [sentence for of_team in tickets.SENTENCES.values() for split in of_team.values() for sentence in split]
    assert len(set(sentences)) == len(sentences)


def test_the_same_seed_asks_the_same_tickets_and_held_out_ones_are_always_the_same() -> None:
    first, again, other = ([tickets.ticket("train", seed, number) for number in range(50)] for seed in (0, 0, 1))
    assert first == again != other
    assert tickets.ticket("eval", 0, 7) == tickets.ticket("eval", 1, 7)


def test_every_team_comes_equally_often() -> None:
    teams = Counter(tickets.ticket("eval", 0, number)[1] for number in range(300))
    assert teams == {"billing": 100, "shipping": 100, "technical": 100}


@pytest.mark.parametrize(
    ("answer", "right"),
    [("billing", True), (" Billing.\n", True), ("billing team", False), ("shipping", False), ("", False)],
)
def test_an_answer_is_right_if_it_is_the_team_alone(answer: str, right: bool) -> None:
    assert tickets.is_right(answer, "billing") is right


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) < 110
    assert foreign_imports(APP) == {"tickets", "openai"}


class Server(FakeOpenAI):
    """Answers every second ticket with a team that is none."""

    def __init__(self) -> None:
        self.tickets: list[str] = []
        super().__init__()

    def say(self, number: int, text: str) -> str:
        self.tickets.append(text)
        team = random.Random(text).choice(sorted(tickets.SENTENCES))
        return team if number % 2 else "sales"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_tickets_asked_again_are_the_same_and_each_answer_gets_its_thumb(server: Server) -> None:
    report = run(APP, server, "--questions", "64", "--attempts", "8", "--thumbs", "1")
    assert (report["questions"], report["thumbs"], report["failed_requests"]) == (64, 64, 0)
    assert all(times % 8 == 0 for times in Counter(server.tickets).values())
    ups = [thumb["thumbs"] == "up" for thumb in server.feedback]
    assert sum(ups) == report["liked"]
    assert not any(name in headers for headers in server.headers_seen for name in ("x-group-id", "x-split"))


@pytest.mark.slow
def test_held_out_tickets_are_marked_and_get_no_thumb(server: Server) -> None:
    report = run(APP, server, "--questions", "30", "--split", "eval")
    assert len(report["each"]) == 30 and sum(report["each"]) == report["liked"]
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert server.feedback == []
