"""The messages and the app of examples/records, the app against a small server on a real socket."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real.task import DEMONSTRATION_SEED, DEMONSTRATIONS
from benchmarks.real.tasks import TASKS
from tests.examples.conftest import FakeOpenAI, foreign_imports, run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "records"
APP = FOLDER / "app.py"
sys.path.insert(0, str(FOLDER))

import records  # noqa: E402


def test_held_out_messages_share_no_sentence_and_no_value_with_training() -> None:
    for values in (records.FIRST, records.LAST, records.TOWNS, records.ITEMS):
        assert not set(values["train"]) & set(values["eval"])
    for sentences in (records.SENTENCES, records.REMARKS):
        assert not set(sentences["train"]) & set(sentences["eval"])


def test_the_same_seed_gives_the_same_messages_and_those_of_eval_are_always_the_same() -> None:
    first, again, other = ([records.record("train", seed, number) for number in range(50)] for seed in (0, 0, 1))
    assert first == again != other
    assert records.record("eval", 0, 7) == records.record("eval", 1, 7)


def test_the_rule_program_reads_plain_training_messages_and_errs_about_none() -> None:
    messages = [records.record("train", 64, number) for number in range(1000)]
    scores = [records.score(records.teach(text), facts) for text, facts in messages]
    assert set(scores) == {(1, 1.0), (0, 0.0)}
    assert 60 < sum(right for right, _ in scores) < 110
    assert records.teach(records.record("eval", 0, 0)[0]) == "{}"


def test_the_first_questions_to_the_rule_program_give_the_demonstrations() -> None:
    lessons = TASKS["json"].lessons
    assert lessons is not None
    asks = [records.record("train", DEMONSTRATION_SEED, number) for number in range(lessons.questions)]
    assert sum(records.score(records.teach(text), facts)[0] for text, facts in asks) == DEMONSTRATIONS


FACTS = {"name": "Anna Berg", "town": "Oslo", "item": "lamps", "count": 3}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (json.dumps(FACTS), (1, 1.0)),
        (f" {json.dumps(dict(reversed(FACTS.items())))}\n", (1, 1.0)),
        (json.dumps(FACTS | {"town": "Porto"}), (0, 0.75)),
        (json.dumps(FACTS | {"count": "3"}), (0, 0.75)),
        (json.dumps(FACTS | {"count": True}), (0, 0.75)),
        ('{"name": "Anna Berg"}', (0, 0.25)),
        (json.dumps(FACTS | {"price": 9}), (0, 0.0)),
        (f"Here it is: {json.dumps(FACTS)}", (0, 0.0)),
        ('["Anna Berg"]', (0, 0.0)),
        ("", (0, 0.0)),
    ],
)
def test_a_record_is_scored_by_its_fields_and_nothing_may_stand_around_it(
    answer: str, score: tuple[int, float]
) -> None:
    assert records.score(answer, FACTS) == score


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 110
    assert foreign_imports(APP) == {"records", "openai"}


class Server(FakeOpenAI):
    """Answers every second message with its record, others with that of another order, eval messages emptily."""

    def say(self, number: int, text: str) -> str:
        return WRITTEN.get(text if number % 2 else records.record("train", 9, number)[0], "")


WRITTEN = {
    text: json.dumps(facts) for text, facts in (records.record("train", s, n) for s in (0, 9) for n in range(400))
}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def rewards_of(server: Server) -> list[float]:
    return [entry["reward"] for posted in server.feedback for entry in entries(posted)]


def entries(posted: Any) -> list[dict[str, Any]]:
    assert isinstance(posted, list)
    return posted


@pytest.mark.slow
def test_each_attempt_of_a_request_gets_its_own_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "30", "--attempts", "4")
    assert (report["questions"], report["answers"], report["failed_requests"]) == (30, 120, 0)
    assert rewards_of(server).count(1.0) == report["right"] >= 60
    for posted in server.feedback:
        assert [entry["choice"] for entry in entries(posted)] == [0, 1, 2, 3]
        assert len({entry["completion_id"] for entry in entries(posted)}) == 1
    assert not any(name in headers for headers in server.headers_seen for name in ("x-group-id", "x-split"))


@pytest.mark.slow
def test_shuffled_rewards_are_those_of_other_messages(server: Server) -> None:
    report = run(APP, server, "--questions", "200", "--attempts", "2", "--shuffle-rewards")
    right = [[choice["reward"] == 1.0 for choice in entries(posted)] for posted in server.feedback]
    total = sum(map(sum, right))
    assert 0.3 < total / 400 < 0.7 and {len(pair) for pair in right} == {2} and len(right) == 200
    # Both answers to a message are equal here, and so would be their own rewards.
    assert report["right"] == 200 and any(sum(pair) == 1 for pair in right)


@pytest.mark.slow
def test_held_out_messages_are_marked_are_sent_once_and_get_no_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "30", "--split", "eval", "--attempts", "8")
    assert report["each"] == [0] * 30 and len(report["fields"]) == 30 and max(report["fields"]) < 1
    assert (report["answers"], server.feedback) == (30, [])
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
