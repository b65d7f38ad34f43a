"""Rating on any page: thumbs, scores, comments and right answers become feedback that names its rater; the queue."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from migrations import schema
from tests.unit.proxy.conftest import RunningProxy
from tests.unit.proxy.dashboard.test_crawl import get, words
from tests.unit.proxy.dashboard.test_middleware import Person, make_key
from tests.unit.proxy.ui_scene import QUESTION, Scene, fill

f = schema.feedback.c
HISTORY = timedelta(days=1)


@pytest.fixture
def scene(proxy: RunningProxy) -> Scene:
    """Attempts of every kind, on either database."""
    scene = Scene(proxy.engine, datetime.now(UTC) - HISTORY)
    fill(scene)
    return scene


@pytest.fixture
def person(proxy: RunningProxy) -> Iterator[Person]:
    person = Person(proxy)
    yield person
    person.client.close()


def stored(proxy: RunningProxy, target_id: str) -> list[dict[str, Any]]:
    columns = (f.target_kind, f.source, f.reward, f.comment, f.demonstration, f.final, f.metadata, f.key_id, f.state)
    query = select(*columns).where(f.target_id == target_id, f.created_at > datetime.now(UTC) - HISTORY / 2)
    with proxy.engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(query.order_by(f.created_at, f.id))]


def queue_of(page: str) -> list[str]:
    return re.findall(r'<h2 id="attempt-\d+-h"><a href="/ui/trajectories/([^"]+)">', page)


def pressed(page: str, kind: str, target_id: str) -> list[str]:
    """The buttons of a rating form that are shown as chosen."""
    form = page.partition(f'action="/ui/rate/{kind}/{target_id}"')[2].partition("</form>")[0]
    return re.findall(r'aria-label="([^"]+)" aria-keyshortcuts="." aria-pressed="true"', form)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thumbs": "up"}, {"source": "thumbs", "reward": 1.0}),
        ({"thumbs": "down", "comment": " too long "}, {"source": "thumbs", "reward": 0.0, "comment": "too long"}),
        ({"score": "4"}, {"source": "reward", "reward": 0.75, "metadata": {"rater": "local", "score": 4}}),
        (
            {"demonstration": "At 12:15."},
            {"source": "demonstration", "reward": None, "demonstration": {"role": "assistant", "content": "At 12:15."}},
        ),
        (
            {"score": "1", "demonstration": "At 12:15."},
            {"reward": 0.0, "demonstration": {"role": "assistant", "content": "At 12:15."}},
        ),
    ],
)
def test_a_rating_is_feedback_that_names_its_rater(
    proxy: RunningProxy, scene: Scene, person: Person, fields: dict[str, str], expected: dict[str, Any]
) -> None:
    page = "/ui/groups/waiting-for-more"
    answer = person.send("/ui/rate/trajectory/waiting-0", page, page=page, **fields)
    assert (answer.status_code, answer.headers["location"]) == (303, page)
    (row,) = stored(proxy, "waiting-0")
    assert row | expected == row
    assert row["metadata"]["rater"] == "local" and row["target_kind"] == "trajectory" and row["state"] == "waiting"
    assert row["final"] is (row["reward"] is not None), "as with feedback of an app"
    assert "Saved" in words(person.get(page).text)


def test_one_answer_is_rated_and_its_trajectory_goes_on(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    page = "/ui/trajectories/waiting-1"
    person.send("/ui/rate/completion/waiting-1-0", page, page=page, score="2", comment="vague")
    (row,) = stored(proxy, "waiting-1-0")
    assert (row["target_kind"], row["reward"], row["final"], row["comment"]) == ("completion", 0.25, False, "vague")
    shown = person.get(page).text
    assert pressed(shown, "completion", "waiting-1-0") == ["Score 2 of 5"]
    assert pressed(shown, "trajectory", "waiting-1") == []


def test_pages_show_ones_own_last_rating(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    for fields in ({"score": "5"}, {"thumbs": "down"}):
        person.send("/ui/rate/trajectory/waiting-2", **fields)
    for page in ("/ui/groups/waiting-for-more", "/ui/trajectories/waiting-2"):
        assert pressed(person.get(page).text, "trajectory", "waiting-2") == ["Thumbs down"], page
    person.send("/ui/rate/name", rater="Berta")
    assert pressed(person.get("/ui/trajectories/waiting-2").text, "trajectory", "waiting-2") == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "choose thumbs"),
        ({"comment": "hm"}, "a comment alone is not stored"),
        ({"score": "6"}, "whole number from 1 to 5"),
        ({"score": "0"}, "whole number from 1 to 5"),
        ({"score": "x"}, "whole number from 1 to 5"),
        ({"thumbs": "up", "comment": "x" * 20_001}, "comment is over 20000 characters"),
    ],
)
def test_what_is_no_rating_is_refused_on_the_page_it_came_from(
    plain_proxy: RunningProxy, fields: dict[str, str], why: str
) -> None:
    fill(Scene(plain_proxy.engine, datetime.now(UTC) - HISTORY))
    person, page = Person(plain_proxy), "/ui/trajectories/waiting-0"
    answer = person.send("/ui/rate/trajectory/waiting-0", page, page=page, **fields)
    assert (answer.status_code, answer.headers["location"]) == (303, page)
    shown = person.get(page).text
    assert 'role="alert"' in shown and why in words(shown)
    headers = {"accept": "application/json"}
    answer = person.client.post(
        "/ui/rate/trajectory/waiting-0", data={"csrf": person.csrf(), **fields}, headers=headers
    )
    assert answer.status_code == 400 and why in answer.json()["message"]
    assert stored(plain_proxy, "waiting-0") == []
    person.client.close()


def test_a_script_gets_the_message_and_stays_on_its_page(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    fields = {"csrf": person.csrf(), "thumbs": "up"}
    answer = person.client.post("/ui/rate/trajectory/waiting-0", data=fields, headers={"accept": "application/json"})
    assert (answer.status_code, answer.json()) == (200, {"message": "Saved: thumbs up", "reward": 1.0})
    assert "set-cookie" not in answer.headers
    fields = {"csrf": person.csrf(), "score": "2"}
    headers = {"accept": "application/json"}
    assert person.client.post("/ui/rate/trajectory/waiting-0", data=fields, headers=headers).json()["reward"] == 0.25
    answer = person.client.post("/ui/rate/completion/waiting-1-0", data=fields, headers=headers)
    assert answer.json() == {"message": "Saved: score 2"}, "a rating of one answer is not the attempt's reward"


def test_a_form_leads_nowhere_but_to_the_dashboard(plain_proxy: RunningProxy) -> None:
    person = Person(plain_proxy)
    for page in ("https://evil.example", "//evil.example", "/v1/models"):
        answer = person.send("/ui/rate/trajectory/t", "/ui/rate", page=page, thumbs="up")
        assert answer.headers["location"] == "/ui/policies"
    person.client.close()


def test_a_rater_is_named_by_the_key_or_by_themselves(plain_proxy: RunningProxy) -> None:
    scene = Scene(plain_proxy.engine, datetime.now(UTC) - HISTORY)
    fill(scene)
    key = make_key(plain_proxy, "admin")
    person = Person(plain_proxy)
    person.sign_in(key)
    assert "You rate as a person's" in words(person.get("/ui/rate").text)
    person.send("/ui/rate/trajectory/waiting-0", thumbs="up")
    person.send("/ui/rate/name", rater="  Änne  <b> ")
    shown = person.get("/ui/rate").text
    assert "You rate as Änne <b>" in words(shown) and "<b>" not in shown
    person.send("/ui/rate/trajectory/waiting-0", thumbs="down")
    person.send("/ui/rate/name", rater="")
    person.send("/ui/rate/trajectory/waiting-0", score="3")
    rows = stored(plain_proxy, "waiting-0")
    assert [row["metadata"]["rater"] for row in rows] == ["a person's", "Änne <b>", "a person's"]
    assert {row["key_id"] for row in rows} == {key.split("_")[1]}
    person.send("/ui/rate/name", rater="x" * 101)
    assert "1 to 100 characters" in words(person.get("/ui/rate").text)
    person.client.close()


def test_two_keys_are_two_raters(plain_proxy: RunningProxy) -> None:
    fill(Scene(plain_proxy.engine, datetime.now(UTC) - HISTORY))
    for name, score in (("Anna", "5"), ("Ben", "2")):
        person = Person(plain_proxy)
        person.sign_in(make_key(plain_proxy, "admin", name=name))
        person.send("/ui/rate/trajectory/waiting-0", "/ui/rate", score=score)
        person.send("/ui/rate/trajectory/waiting-1", "/ui/rate", score=score)
        shown = words(person.get("/ui/rate/raters").text)
        person.client.close()
    assert "Anna and Ben 2 0 % 0.75" in shown
    assert "Rated by several 2" in shown


def test_the_queue_begins_with_what_raters_disagree_about(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    for rater, reward in (("Anna", 1.0), ("Ben", 0.0)):
        scene.feedback("agent", reward, trajectory_id="agent", state="applied", metadata={"rater": rater})
        scene.feedback("waiting-0", 1.0, trajectory_id="waiting-0", state="applied", metadata={"rater": rater})
    order = queue_of(person.get("/ui/rate?split=all").text)
    assert order[0] == "agent", "they disagree"
    assert order.index("waiting-1") < order.index("to-look-at") < order.index("waiting-0")
    rateable = {"agent", "to-look-at", "waiting-0", "waiting-1", "waiting-2", "long", "dialects", "hostile", "held-out"}
    assert set(order) == rateable | {"unspelled"}, "nothing that was trained on or excluded"
    assert set(queue_of(person.get("/ui/rate").text)) == set(order) - {"held-out"}, "not by default"
    held_out = person.get("/ui/rate?split=eval").text
    assert queue_of(held_out) == ["held-out"] and "changes the held-out figures" in held_out


def test_what_one_has_rated_leaves_the_queue_at_once_and_for_oneself_only(
    proxy: RunningProxy, scene: Scene, person: Person
) -> None:
    before = queue_of(person.get("/ui/rate").text)
    person.send("/ui/rate/trajectory/agent", score="3")
    assert queue_of(person.get("/ui/rate").text) == [name for name in before if name != "agent"]
    person.send("/ui/rate/name", rater="Berta")
    assert "agent" in queue_of(person.get("/ui/rate").text)


def test_the_queue_is_filtered(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    assert queue_of(person.get("/ui/rate?split=eval").text) == ["held-out"]
    assert queue_of(person.get("/ui/rate?task=travel").text) == ["agent"]
    assert "Nothing to rate" in words(person.get("/ui/rate?policy=nobody").text)


def test_the_next_attempts_follow_those_shown_whatever_was_rated(proxy: RunningProxy, scene: Scene) -> None:
    for place in range(45):
        name = f"more-{place:02}"
        scene.attempt(name, None, task="more", created_at=scene.now + timedelta(seconds=place // 3))
        scene.says(name, 0, [{"role": "user", "content": QUESTION}], "It arrives at 12:15.")
    person, seen = Person(proxy), []
    path: str | None = "/ui/rate?task=more"
    while path:
        page = get(proxy, path)
        names = queue_of(page)
        seen += names
        for name in names[::2]:  # every second one, the last of a page too
            person.send(f"/ui/rate/trajectory/{name}", thumbs="up")
        later = re.search(r'href="([^"]+)" rel="next"', page)
        path = later[1].replace("&amp;", "&") if later else None
    person.client.close()
    assert len(seen) == len(set(seen)) == 45


def test_the_queue_begins_with_one_attempt_of_each_group(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    for group, rewards in (("first", (None, None, None)), ("second", (1.0, 1.0))):
        scene.group(group, target_size=3)
        for place, reward in enumerate(rewards):
            name = f"{group}-{place}"
            scene.attempt(name, group, task="more", created_at=scene.now - timedelta(seconds=place))
            scene.says(name, 0, [{"role": "user", "content": QUESTION}], "It arrives at 12:15.")
            if reward is not None:
                scene.feedback(name, reward, trajectory_id=name, state="applied")
    order = queue_of(person.get("/ui/rate?task=more").text)
    assert order == ["first-0", "second-0", "first-1", "second-1", "first-2"]
    person.send("/ui/rate/trajectory/first-0", thumbs="up")
    order = queue_of(person.get("/ui/rate?task=more").text)
    assert order == ["second-0", "first-1", "second-1", "first-2"], "the others keep their places"


def test_reviews_name_their_rater_too(proxy: RunningProxy, scene: Scene, person: Person) -> None:
    person.send("/ui/reviews/to-look-at", "/ui/reviews", reward="0.5")
    (row,) = stored(proxy, "to-look-at")
    assert row["metadata"] == {"rater": "local"}


def test_a_groups_card_shows_what_came_before_the_last_answer(proxy: RunningProxy, scene: Scene) -> None:
    scene.group("talks", target_size=2)
    for name in ("talk-a", "talk-b"):
        scene.attempt(name, "talks", 9)
        for turn in range(9):
            scene.says(name, turn, [{"role": "user", "content": f"question {turn} of {name}"}], f"answer {turn}!")
    page = get(proxy, "/ui/groups/talks")
    card = page.partition('id="card-1"')[2].partition("</article>")[0]
    fold = words("<main" + card.partition('class="fold"')[2].partition("</details>")[0] + "</main>")
    assert "8 earlier turns" in fold
    assert [one for one in range(9) if f"answer {one}!" in fold] == [0, 1, 2, 3, 4, 5]
    assert "question 1 of talk-a" in fold and "question 0 of" not in fold, "the prompt stands above"
    assert "2 more turns" in fold


def test_rating_needs_the_forms_token(plain_proxy: RunningProxy) -> None:
    fill(Scene(plain_proxy.engine, datetime.now(UTC) - HISTORY))
    headers = {"accept": "application/json"}
    for path in ("trajectory/waiting-0", "completion/waiting-0-0", "name"):
        answer = plain_proxy.client.post(f"/ui/rate/{path}", data={"thumbs": "up"}, headers=headers)
        assert answer.status_code == 403
    assert stored(plain_proxy, "waiting-0") == []
