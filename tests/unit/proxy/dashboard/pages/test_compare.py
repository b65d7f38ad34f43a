"""Comparing versions: one prompt to two sides, recorded as evaluation; what is refused; preferences as feedback."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest
from sqlalchemy import select

from migrations import schema
from proxy.dashboard.pages.compare import MOST_SAMPLES
from tests.unit.proxy.conftest import FakeHandler, FakeVllm, RunningProxy, answer, wait_for
from tests.unit.proxy.dashboard.test_crawl import words
from tests.unit.proxy.dashboard.test_middleware import Person
from tests.unit.proxy.ui_scene import QUESTION, TOOL, Scene

f, t = schema.feedback.c, schema.trajectories.c


@pytest.fixture
def person(plain_proxy: RunningProxy) -> Iterator[Person]:
    person = Person(plain_proxy)
    yield person
    person.client.close()


def compare(person: Person, **fields: str) -> str:
    """Start a comparison; return the address of its page."""
    form = {"a": "starter@v0", "b": "starter", "samples": "2", "max_tokens": "16", "prompt": QUESTION}
    response = person.send("/ui/compare/start", "/ui/compare", **(form | fields))
    assert response.status_code == 303
    return response.headers["location"]


def shown(person: Person, path: str, text: str) -> str:
    """The comparison's page, once no answer is waited for; it has this text."""
    page = str(wait_for(lambda: "data-live" not in (page := person.get(path).text) and page))
    assert text in words(page)
    return page


def trajectories(proxy: RunningProxy, path: str) -> dict[str, Any]:
    comparison_id = path.partition("?")[0].rpartition("/")[2]
    query = select(schema.trajectories).where(t.id.startswith(comparison_id))
    with proxy.engine.connect() as connection:
        return {row.id.rpartition(".")[2]: row for row in connection.execute(query)}


def test_both_sides_answer_and_all_is_recorded_as_evaluation(plain_proxy: RunningProxy, person: Person) -> None:
    path = compare(person, system="Be terse.", temperature="0,5")
    page = shown(person, path, "B starter starter@v0 2 of 2")
    assert words(page).count("Hello") == 4 and QUESTION in words(page) and "Be terse." in words(page)
    assert "waiting" not in words(page) and "data-live" not in page
    rows = trajectories(plain_proxy, path)
    assert sorted(rows) == ["a1", "a2", "b1", "b2"]
    assert {(row.split, row.no_train, row.group_id) for row in rows.values()} == {("eval", True, None)}
    assert {rows[name].metadata["model"] for name in ("a1", "a2")} == {"starter@v0"}
    completions = plain_proxy.recorded(4)
    assert {row.why_not_trained for row in completions} <= {None} and len(completions) == 4
    assert {json.dumps(row.sampling, sort_keys=True) for row in completions} == {
        '{"max_tokens": 16, "temperature": 0.5}'
    }
    person.get(path.partition("?")[0])  # the address alone is enough later
    assert shown(person, path.partition("?")[0], "A starter@v0 starter@v0 2 of 2")


def test_a_recorded_prompt_is_sent_with_its_conversation_and_tools(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, person: Person
) -> None:
    scene = Scene(plain_proxy.engine, datetime.now(UTC) - timedelta(days=1))
    scene.attempt("game", None, 2, task="x")
    scene.says("game", 0, [{"role": "user", "content": "one"}], "first", tools=[TOOL])
    sampling = {"temperature": 0.7, "stream": True, "n": 3}
    scene.says("game", 1, [{"role": "user", "content": "two"}], "second", sampling=sampling, end_user="alice")
    form = person.get("/ui/compare?trajectory=game").text
    assert "Turn 2 of game" in words(form) and "first" in words(form) and "second" not in words(form)
    turn_page = person.get("/ui/trajectories/game").text
    assert 'href="/ui/compare?trajectory=game&turn=1"' in turn_page
    path = compare(person, trajectory="game", turn="1", samples="1", prompt="")
    page = shown(person, path, "1 of 1 0")
    for body in fake_vllm.requests:
        assert [one["content"] for one in body["messages"]] == ["one", "first", "two"]
        assert (body["temperature"], body["tools"], body.get("n", 1)) == (0.7, [TOOL], 1)
    assert len(fake_vllm.requests) == 2
    rows = trajectories(plain_proxy, path)
    assert {(row.task, row.end_user, row.metadata["replay_of"]) for row in rows.values()} == {("x", "alice", "game-1")}
    again = re.search(r'href="([^"]+)">Compare again', page)
    assert again is not None and "trajectory=game&turn=1" in unescape(again[1])


def defaults(person: Person, path: str = "/ui/compare") -> tuple[str | None, str | None]:
    """The temperature and the number of tokens that the form begins with."""
    page = person.get(path).text
    both = (re.search(rf'<input name="{name}"[^>]* value="([^"]*)"', page) for name in ("temperature", "max_tokens"))
    return tuple(one and one[1] for one in both)  # type: ignore[return-value]


def test_the_form_begins_with_what_apps_usually_send(plain_proxy: RunningProxy, person: Person) -> None:
    assert defaults(person) == (None, "512")
    scene = Scene(plain_proxy.engine, datetime.now(UTC) - timedelta(days=1))
    sent: list[dict[str, Any]] = [{"temperature": 0.7, "max_completion_tokens": 64}] * 2 + [{"temperature": 1.0}]
    for number, sampling in enumerate(sent):
        scene.attempt(f"a{number}", None)
        scene.says(f"a{number}", 0, [{"role": "user", "content": QUESTION}], "12:15", sampling=sampling)
    assert defaults(person) == ("0.7", "64")
    for number in range(4):  # answers of comparisons are no calls of an app
        scene.attempt(f"compare-{number}", None)
        scene.says(f"compare-{number}", 0, [{"role": "user", "content": "?"}], "!", sampling={"max_tokens": 9})
    assert defaults(person) == ("0.7", "64")
    assert "those of the newest calls for starter" in words(person.get("/ui/compare").text)
    assert defaults(person, "/ui/compare?a=starter&b=nothing") == (None, "512")
    assert defaults(person, "/ui/compare?trajectory=a0")[0] is None, "a recorded call has its own"


def test_a_call_that_fails_says_why_and_the_others_go_on(
    plain_proxy: RunningProxy, fake_vllm: FakeVllm, person: Person
) -> None:
    seen: list[dict[str, Any]] = []

    def first_fails(handler: FakeHandler, body: dict[str, Any]) -> None:
        seen.append(body)
        if len(seen) == 1:
            handler.whole(400, {"error": {"message": "the prompt is too long <b>"}})
        else:
            handler.whole(200, answer())

    fake_vllm.script = first_fails
    path = compare(person, samples="1")
    page = shown(person, path, "the prompt is too long <b>")
    shown(person, path, "Hello")
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"samples": str(MOST_SAMPLES + 1)}, "samples must be a whole number from 1 to 8"),
        ({"samples": "x"}, "samples must be a whole number"),
        ({"prompt": "  "}, "enter a prompt"),
        ({"max_tokens": "0"}, "max_tokens must be a whole number"),
        ({"temperature": "nan"}, "temperature must be a number from 0 to 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    plain_proxy: RunningProxy, person: Person, fields: dict[str, str], why: str
) -> None:
    assert compare(person, **fields) == "/ui/compare"
    assert why in words(person.get("/ui/compare").text)
    assert plain_proxy.rows() == []


def test_unknown_things_are_not_there(plain_proxy: RunningProxy, person: Person) -> None:
    for path in ("/ui/compare/start", "/ui/compare/compare-x", f"/ui/compare/compare-{'f' * 32}"):
        assert person.get(path).status_code == 404, path
    assert person.get("/ui/compare?trajectory=nope").status_code == 404
    response = person.send(f"/ui/compare/compare-{'0' * 32}/preference/9", "/ui/compare", better="a")
    assert response.status_code == 303 and "1 to 8" in words(person.get("/ui/compare").text)


def test_a_preference_is_stored_as_two_rewards_only_when_it_is_chosen(
    plain_proxy: RunningProxy, person: Person
) -> None:
    path = compare(person, samples="1")
    shown(person, path, "B starter starter@v0 1 of 1")
    assert plain_proxy.rows(schema.feedback) == []
    comparison = path.partition("?")[0]
    for better, rewards in (("a", (1.0, 0.0)), ("same", (0.5, 0.5)), ("b", (0.0, 1.0))):
        response = person.send(f"{comparison}/preference/1", path, better=better, page=path)
        assert response.headers["location"] == path
        rows = [row for row in plain_proxy.rows(schema.feedback) if row.metadata["better"] == better]
        assert {(row.target_id.rpartition(".")[2], row.reward) for row in rows} == {
            ("a1", rewards[0]), ("b1", rewards[1]),
        }  # fmt: skip
        assert {row.metadata["rater"] for row in rows} == {"local"}
        assert {row.metadata["compared_with"] for row in rows} == {row.target_id for row in rows}
        page = person.get(path).text
        assert re.findall(r'name="better" value="(\w+)" aria-pressed="true"', page) == [better]
    person.send(f"{comparison}/preference/1", path, better="c", page=path)
    assert "choose the better answer" in words(person.get(path).text)
    assert len(plain_proxy.rows(schema.feedback)) == 6


def test_answers_are_rated_there_like_any_attempt(plain_proxy: RunningProxy, person: Person) -> None:
    path = compare(person, samples="1")
    page = shown(person, path, "B starter starter@v0 1 of 1")
    (rated, _) = re.findall(r'action="(/ui/rate/trajectory/[^"]+)"', page)
    person.send(rated, path, score="5", page=path)
    (row,) = plain_proxy.rows(schema.feedback)
    assert (row.reward, row.target_id) == (1.0, rated.rpartition("/")[2])
