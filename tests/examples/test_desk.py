"""The requests, the tools and the app of examples/desk, the app against a rule program on a real socket."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fakes.teacher import message_of
from benchmarks.real.task import DEMONSTRATION_SEED, DEMONSTRATIONS
from benchmarks.real.tasks import TASKS
from tests.examples.conftest import FakeOpenAI, foreign_imports, run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "desk"
APP = FOLDER / "app.py"
sys.path.insert(0, str(FOLDER))

import desk  # noqa: E402


def test_held_out_requests_share_no_sentence_and_no_value_with_training() -> None:
    for values in (desk.FIRST, desk.LAST, desk.ITEMS):
        assert not set(values["train"]) & set(values["eval"])
    assert not set(desk.SENTENCES["train"]) & set(desk.SENTENCES["eval"])


def test_the_same_seed_gives_the_same_requests_and_those_of_eval_are_always_the_same() -> None:
    first, again, other = ([desk.request("train", seed, number) for number in range(50)] for seed in (0, 0, 1))
    assert first == again != other
    assert desk.request("eval", 0, 7) == desk.request("eval", 1, 7)


def test_the_rule_program_solves_the_requests_that_it_understands_in_three_turns() -> None:
    actions = Counter[str]()
    for number in range(1000):
        request = desk.request("train", 64, number)
        messages = request.messages()
        while not isinstance(turn := desk.teach(messages), str):
            ((tool, arguments),) = turn
            messages.append({"role": "assistant", "content": None})
            messages.append({"role": "tool", "content": request.use(tool, json.dumps(arguments))})
        if len(messages) == 2:
            actions["none"] += 1
            assert request.reward(turn) == 0
        else:
            actions[request.right_action[0]] += 1
            assert len(messages) == 2 * desk.TURNS and request.reward(turn) == 1
    assert set(actions) == {"refund", "decline", "none"} and min(actions.values()) > 90 and actions["none"] > 650


def test_the_lessons_have_as_many_demonstrations_as_are_imitated() -> None:
    lessons = TASKS["agent"].lessons
    assert lessons is not None
    requests = [desk.request("train", DEMONSTRATION_SEED, number) for number in range(lessons.questions)]
    assert sum(not isinstance(desk.teach(request.messages()), str) for request in requests) == DEMONSTRATIONS


def test_only_the_right_action_and_reply_solve_a_request() -> None:
    declined, other = (desk.Request("", "Anna Berg", 4410, 35, rule) for rule in ("decline", "refund"))
    assert declined.right_action == ("decline", {"order": 4410})
    assert other.right_action == ("refund", {"order": 4410, "amount": 35})
    assert json.loads(other.use("find", '{"name": "Anna Berg"}')) == {"order": 4410, "price": 35, "rule": "refund"}
    assert json.loads(other.use("find", '{"name": "Anna"}')) == {"error": "no such customer"}
    assert json.loads(other.use("find", "Anna")) == {"error": "no JSON"}
    assert not other.solved("We refunded 35 euros.")
    other.use("refund", '{"order": 4410, "amount": 35}')
    assert other.solved("We refunded 35 euros.") and not other.solved("We refunded 53 euros.")
    assert (other.reward("We refunded 35 euros."), other.reward("No."), declined.reward("No.")) == (1.0, 2 / 3, 0.0)


def test_a_second_action_does_not_undo_the_first() -> None:
    request = desk.Request("", "Anna Berg", 4410, 35, "refund")
    request.use("decline", '{"order": 4410}')
    request.use("refund", '{"order": 4410, "amount": 35}')
    assert not request.solved("We refunded 35 euros.")


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 110
    assert foreign_imports(APP) == {"desk", "openai"}


class Server(FakeOpenAI):
    """Handles requests by rule; every fourth answer calls a tool with no JSON."""

    wrong = True

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        fields = super().answer(number, body)
        message = message_of(desk.teach(body["messages"]))
        if self.wrong and number % 4 == 0 and "tool_calls" in message:
            message["tool_calls"][0]["function"]["arguments"] = "{"
        fields["choices"][0]["message"] = message
        return fields

    def say(self, number: int, text: str) -> str:
        return ""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_attempts_at_a_request_are_a_group_and_each_gets_its_reward(server: Server) -> None:
    server.wrong = False
    report = run(APP, server, "--questions", "96", "--attempts", "8")
    requests = [desk.request("train", 0, number) for number in range(12)]
    known = 8 * sum(not isinstance(desk.teach(request.messages()), str) for request in requests)
    assert 0 < known < 96
    assert (report["solved"], report["turns"]) == (known, 3 * known + 96 - known)
    assert (report["questions"], report["failed_requests"]) == (96, 0)
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {8: 12}
    rewards = {posted["trajectory_id"]: posted["reward"] for posted in server.feedback}
    assert rewards.keys() == groups.keys() and Counter(rewards.values()) == {1.0: known, 0.0: 96 - known}
    assert len({(groups[trajectory], reward) for trajectory, reward in rewards.items()}) == 12


@pytest.mark.slow
def test_a_call_without_json_is_no_failure_of_the_app(server: Server) -> None:
    report = run(APP, server, "--questions", "40")
    assert report["failed_requests"] == 0 and 0 < report["solved"] < 40
    assert sum(posted["reward"] == 1 for posted in server.feedback) == report["solved"]


@pytest.mark.slow
def test_held_out_requests_are_marked_and_get_no_reward(server: Server) -> None:
    server.refused = 30
    report = run(APP, server, "--questions", "30", "--split", "eval")
    assert len(report["each"]) == len(report["fields"]) == 30 and report["failed_requests"] == 30
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert not any("x-group-id" in headers for headers in server.headers_seen) and server.feedback == []
