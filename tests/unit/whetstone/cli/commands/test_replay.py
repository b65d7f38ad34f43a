"""`whetstone replay`: what is sent again, as which kind of call, and what is shown of the answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.fakes.json_server import Handler, Server, chat_answer
from tests.unit.whetstone.cli.commands.test_trajectories import Here, here
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses

__all__ = ["here"]


class Proxy(Server):
    """Answers chats with the texts of `texts`, by the number of messages; without one, it refuses."""

    def __init__(self) -> None:
        super().__init__(_ProxyHandler)
        self.texts: dict[int, str] = {}
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []


class _ProxyHandler(Handler):
    server: Proxy

    def respond(self, body: dict[str, Any]) -> None:
        self.server.requests.append((body, {name.lower(): value for name, value in self.headers.items()}))
        text = self.server.texts.get(len(body["messages"]))
        if text is None:
            self.whole(
                404,
                {"error": {"message": "vLLM has not loaded starter@v7; `whetstone versions pin starter 7` loads it"}},
            )
        else:
            self.whole(200, chat_answer(text, body["model"]))


@pytest.fixture
def proxy(here: Here) -> Iterator[Proxy]:
    here.seed.trajectory("game", turns=0, task="x")
    here.seed.completion("game", 0, sampling={"temperature": 0.5, "stream": True, "metadata": {"group_id": "g"}})
    here.seed.completion("game", 1, sampling=None, end_user="alice")
    with Proxy() as proxy:
        write_addresses(here.data, proxy=proxy.url)
        yield proxy


def test_each_turn_is_sent_with_the_recorded_messages_before_it_as_evaluation(here: Here, proxy: Proxy) -> None:
    proxy.texts = {1: "answer 0", 3: "another"}
    result = here.run("replay", "game", "--version", "v7", "--json")
    assert result.exit_code == 0, result.output
    (first, headers), (second, more) = proxy.requests
    assert first == {
        "model": "starter@v7", "temperature": 0.5, "messages": [{"role": "user", "content": "question 0"}],
    }  # fmt: skip
    assert [one["content"] for one in second["messages"]] == ["question 0", "answer 0", "question 1"]
    assert second["user"] == "alice"
    assert (headers["x-split"], headers["x-no-train"], headers["x-task"]) == ("eval", "true", "x")
    assert json.loads(headers["x-metadata"]) == {"replay_of": "game-0"}
    names = {headers["x-trajectory-id"], more["x-trajectory-id"]}
    assert len(names) == 2 and all(name.startswith("replay-") for name in names)
    shown = json.loads(result.stdout)
    assert [(one["turn"], one["same"], one["before"], one["after"]) for one in shown] == [
        (0, True, "answer 0", "answer 0"), (1, False, "answer 1", "another"),
    ]  # fmt: skip


def test_differences_are_shown_line_by_line(here: Here, proxy: Proxy) -> None:
    proxy.texts = {1: "answer 0", 3: "another"}
    lines = [line.strip() for line in here.run("replay", "game").stdout.splitlines()]
    assert {"the same as v0", "- v0   + starter", "- answer 1", "+ another"} <= set(lines)
    assert lines[-1] == "2 prompts sent to starter: 1 answers are the same"


def test_a_refusal_is_shown_with_its_remedy_and_the_other_turns_go_on(here: Here, proxy: Proxy) -> None:
    proxy.texts = {1: "answer 0"}
    result = here.run("replay", "game", "--version", "7", columns=200)
    assert result.exit_code == 1
    assert "no answer: vLLM has not loaded starter@v7; `whetstone versions pin starter 7` loads it" in result.stdout
    assert "the same as v0" in result.stdout


def test_what_is_no_chat_or_has_no_answer_is_left_out_with_the_reason(here: Here, proxy: Proxy) -> None:
    here.seed.trajectory("other", turns=0)
    here.seed.completion("other", 0, endpoint="messages")
    here.seed.completion("other", 1, status="error", response=None)
    result = here.run("replay", "other", columns=200)
    assert (result.exit_code, proxy.requests) == (1, [])
    assert "turn 0 is left out: messages is not sent again, only chat completions" in result.stdout
    assert "turn 1 is left out: it has no whole answer" in result.stdout


def test_another_policy_can_be_named_and_nonsense_is_refused(here: Here, proxy: Proxy) -> None:
    proxy.texts = {1: "a", 3: "b"}
    here.run("replay", "game", "--version", "second@v2")
    assert {body["model"] for body, _ in proxy.requests} == {"second@v2"}
    assert here.run("replay", "game", "--version", "newest").exit_code == 2


def test_without_a_stack_nothing_is_sent(here: Here) -> None:
    here.seed.trajectory("game")
    result = here.run("replay", "game")
    assert "no stack runs" in str(result.exception)
