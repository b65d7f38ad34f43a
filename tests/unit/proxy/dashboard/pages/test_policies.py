"""The pages of policies and steps: of a policy that has learned and of one that has not; what may be done to it."""

import html
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from migrations import schema
from proxy.dashboard.rendering import number, signed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for
from tests.unit.proxy.dashboard.test_middleware import Person
from tests.unit.proxy.ui_story import HOSTILE, Story
from whetstone.config.rewards import HandoverSettings, RewardSettings
from whetstone.config.settings import Settings
from whetstone.domain.stats import gain, share
from whetstone.registry import reward_store


@pytest.fixture(scope="module")
def known(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """One proxy whose policy has learned, for all that only look."""
    data = tmp_path_factory.mktemp("known")
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    with FakeVllm() as fake:
        proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", fake.url, data))
        Story(proxy.engine, datetime.now(UTC)).tell(attempts=40)
        Story(proxy.engine, datetime.now(UTC)).step(30, 24, datetime.now(UTC))
        yield proxy
        proxy.stop()


@pytest.fixture
def reader(known: RunningProxy) -> Iterator[Person]:
    person = Person(known)
    yield person
    person.client.close()


@pytest.fixture
def learned(proxy: RunningProxy) -> RunningProxy:
    """One of the test's own, on both databases."""
    Story(proxy.engine, datetime.now(UTC)).tell(8, 4)
    return proxy


@pytest.fixture
def person(proxy: RunningProxy) -> Iterator[Person]:
    person = Person(proxy)
    yield person
    person.client.close()


def shown(answer: httpx.Response) -> str:
    """A page as it is read."""
    assert answer.status_code == 200, answer.text
    assert re.search(r"^total;dur=\d+\.\d$", answer.headers["server-timing"])
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text)))


PAGES = (
    "/ui/policies",
    "/ui/policies/starter",
    "/ui/policies/starter?versions_before=5&steps_before=5",
    "/ui/policies/starter/steps/5",
    "/ui/policies/starter/steps/5?after=starter-g5-0+starter-g5-0-3",
)


def test_a_page_shows_and_what_is_hostile_stays_words(learned: RunningProxy, person: Person) -> None:
    for path in PAGES:
        answer = person.get(path)
        assert answer.status_code == 200, path
        assert HOSTILE not in answer.text and "<script>" not in answer.text
        if path in ("/ui/policies/starter/steps/5", "/ui/policies/starter"):
            assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in answer.text


def test_the_overview_tells_what_the_live_version_is_worth(reader: Person) -> None:
    text = shown(reader.get("/ui/policies"))
    assert "starter training" in text and "Live version 24" in text
    assert re.search(r"Gain over version 0 \+0\.\d+ .* \(95 %\), training Live", text) and "Step 30 promoted" in text


def test_a_curve_has_every_version_and_what_became_of_it(reader: Person) -> None:
    (text,) = re.findall(r"data-chart='([^']+)'", reader.get("/ui/policies").text)
    for piece in ('"live": 24', '"state": ["retired", "retired"', '"rejected"'):
        assert piece in text
    assert len(re.findall(r'"x": \[([^]]*)\]', text)[0].split(", ")) == 25


def test_versions_and_steps_are_paged_without_a_gap(reader: Person) -> None:
    def numbers(path: str, part: str) -> list[int]:
        section = reader.get(path).text.split(f'id="{part}"')[1].split("</section>")[0]
        return [int(one) for one in re.findall(r'<th scope="row" class="num">(?:<a [^>]*>)?(\d+)', section)]

    first, rest = numbers("/ui/policies/starter", "steps"), numbers("/ui/policies/starter?steps_before=6", "steps")
    assert first == [30, *range(24, 0, -1)] and rest == [5, 4, 3, 2, 1]
    assert numbers("/ui/policies/starter", "versions") == list(range(24, -1, -1))


def test_a_step_leads_to_what_it_trained_on(reader: Person) -> None:
    text = reader.get("/ui/policies/starter/steps/12").text
    assert 'href="/ui/groups/starter-g12-0"' in text and 'href="/ui/trajectories/starter-g12-2-3"' in text
    text = shown(reader.get("/ui/policies/starter/steps/12"))
    assert "version 11 → 12" in text and "mismatch k3" in text and "train 14.2 s" in text
    assert "← Step 11" in text and "Step 13 →" in text


@pytest.mark.parametrize(
    "path", ["/ui/policies/nosuch", "/ui/policies/starter/steps/99", "/ui/policies/starter/steps/x",
             "/ui/policies/starter/steps/1²", "/ui/policies/nosuch/steps/1", "/ui/nosuch", "/ui/policies/"],
)  # fmt: skip
def test_what_is_not_there_is_a_page_that_says_so(reader: Person, path: str) -> None:
    answer = reader.get(path)
    assert answer.status_code == 404 and "there is no" in answer.text
    assert answer.headers["content-type"].startswith("text/html") and "Back to the policies" in answer.text


@pytest.mark.parametrize("query", ["versions_before=x", "steps_before=-1", "versions_before=99999999999999", "x=%00"])
def test_a_link_that_was_tampered_with_says_what_is_wrong(reader: Person, query: str) -> None:
    answer = reader.get(f"/ui/policies/starter?{query}")
    assert answer.status_code == 400
    assert "must be a whole number" in answer.text or "ids and labels must not contain a NUL character" in answer.text


def test_a_policy_of_which_nothing_is_recorded_teaches_what_to_do(proxy: RunningProxy, person: Person) -> None:
    text = shown(person.get("/ui/policies/starter"))
    assert "Nothing recorded yet" in text and 'model="starter"' in text and "POST /v1/feedback" in text


def test_a_policy_that_only_records_says_how_it_would_train(proxy: RunningProxy, person: Person) -> None:
    proxy.chat()
    proxy.recorded()
    text = shown(person.get("/ui/policies"))
    assert "whetstone policies train on starter" in text and "No trajectory has a reward yet" in text


def test_a_policy_trains_records_and_pauses(learned: RunningProxy, person: Person) -> None:
    for state, message in (
        ("paused", "is paused"),
        ("recording", "is only recorded from now on"),
        ("training", "trains from now on"),
    ):
        answer = person.send("/ui/policies/starter/state", "/ui/policies", state=state, page="/ui/policies")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/policies")
        (row,) = learned.rows(schema.policies)
        assert row.state == state
        assert f"starter {message}" in shown(person.get("/ui/policies"))


def test_the_admin_route_does_the_same(learned: RunningProxy) -> None:
    route = "/admin/policies/starter/state"
    assert learned.client.post(route, json={"state": "paused"}).json()["state"] == "paused"
    (row,) = learned.rows(schema.policies)
    assert row.state == "paused"
    assert learned.client.post(route, json={"state": "sleeping"}).status_code == 400
    assert learned.client.post("/admin/policies/nosuch/state", json={"state": "paused"}).status_code == 404


def test_a_rollback_takes_effect_on_the_next_request(learned: RunningProxy, person: Person) -> None:
    answer = person.send("/ui/policies/starter/rollback", to="0", reason="it swears")
    assert answer.headers["location"] == "/ui/policies/starter"
    assert learned.chat().headers["x-policy-version"] == "0"
    text = shown(person.get("/ui/policies/starter"))
    assert "starter is back at version 0" in text and "it swears" in text


def test_what_is_refused_is_said_on_the_page_it_came_from(learned: RunningProxy, person: Person) -> None:
    for path, fields in (
        ("promote", {"version": "99"}), ("promote", {}), ("promote", {"version": "x"}), ("pin", {"version": "99"}),
        ("rollback", {"to": "77"}), ("state", {"state": "sleeping"}),
    ):  # fmt: skip
        answer = person.send(f"/ui/policies/starter/{path}", **fields)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/policies/starter"), path
        page = person.get("/ui/policies/starter")
        assert 'role="alert"' in page.text, (path, fields)
    (row,) = learned.rows(schema.policies)
    assert row.live_version == 8


def test_a_step_is_asked_for_once(learned: RunningProxy, person: Person) -> None:
    person.send("/ui/policies/starter/step")
    assert "a step of starter was requested" in shown(person.get("/ui/policies/starter"))
    person.send("/ui/policies/starter/step")
    assert "is asked for already" in shown(person.get("/ui/policies/starter"))


def chart(page: httpx.Response) -> dict[str, Any]:
    """The values of the reward curve."""
    (text,) = re.findall(r"data-chart='([^']+)'", page.text.partition("Learning, step by step")[0])
    values: dict[str, Any] = json.loads(html.unescape(text))
    return values


def test_a_curve_shows_training_and_held_out_apart(learned: RunningProxy, person: Person) -> None:
    story = Story(learned.engine, datetime.now(UTC) - timedelta(minutes=1))
    before = chart(person.get("/ui/policies"))
    story.seed.trajectory("eval", None, turns=0, split="eval", reward=0.25, first_version=8, last_version=8)
    after = chart(person.get("/ui/policies"))
    assert (after["held_out"]["y"], after["held_out"]["n"]) == ([None] * 8 + [0.25], [0] * 8 + [1])
    # PostgreSQL adds the parts of a sum in any order, so the last digit may differ.
    assert after["y"] == pytest.approx(before["y"], abs=2e-6)
    without = {"y": None, "held_out": None}
    assert {**after, **without} == {**before, **without}
    assert "held out" in person.get("/ui/policies/starter").text


def test_a_few_rewards_are_no_headline(learned: RunningProxy, person: Person) -> None:
    text = shown(person.get("/ui/policies/starter"))
    assert "Gain over version 0 – no version has 30 rewards that version 0 has too" in text
    assert "Training reward – 16 of 30 rewards" in text and "Held-out reward – none yet" in text
    assert set(chart(person.get("/ui/policies/starter"))["few"]) == {True}


def test_the_headline_agrees_with_the_demos_table(learned: RunningProxy, person: Person) -> None:
    """Both count the same games; the page pairs them by prompt, the demo game by game."""
    story, draw = Story(learned.engine, datetime.now(UTC)), random.Random(1)
    first, last = ([int(draw.random() < share) for _ in range(800)] for share in (0.44, 0.71))
    story.played(0, first)
    story.played(8, last)
    text = shown(person.get("/ui/policies/starter"))
    won, gained = share(last), gain(first, last)
    assert f"Held-out reward {number(won.mean, 3)} {number(won.low, 3)} to {number(won.high, 3)}, n 800" in text
    headline = re.search(r"Gain over version 0 (\S+) (\S+) to (\S+) \(95 %\), held out, 800 pairs", text)
    assert headline is not None and headline[1] == signed(gained.mean)
    assert float(headline[2]) == pytest.approx(gained.low, abs=0.005)
    assert float(headline[3]) == pytest.approx(gained.high, abs=0.005)
    versions = text.partition("stay loaded.")[2]
    assert f"{number(won.mean, 3)} n 800" in versions and f"{number(share(first).mean, 3)} n 800" in versions
    assert chart(person.get("/ui/policies/starter"))["few"][8] is True, "training has few rewards still"


def test_held_out_rewards_are_read_by_an_index_alone(engine: Engine) -> None:
    if engine.dialect.name != "sqlite":
        pytest.skip("PostgreSQL plans by statistics")
    with engine.connect() as connection:
        values = {"project": "default", "policy": "starter", "version": 0}
        (plan,) = connection.execute(text(f"EXPLAIN QUERY PLAN {reward_store._HELD_OUT}"), values).all()
    assert "USING COVERING INDEX ix_trajectories_eval" in plan.detail


def test_a_step_whose_version_was_rolled_back_is_no_success(learned: RunningProxy, person: Person) -> None:
    assert "Step 8 promoted" in shown(person.get("/ui/policies"))
    person.send("/ui/policies/starter/rollback", to="0", reason="it swears")
    for page in ("/ui/policies", "/ui/policies/starter", "/ui/policies/starter/steps/8"):
        assert "Step 8 rolled back" in shown(person.get(page))
    assert "Step 5 rejected" in shown(person.get("/ui/policies/starter/steps/5"))


def test_a_handover_is_on_the_policys_page(
    database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    handover = {"teacher": "gpt", "shares": [0.25, 0.9]}
    values = {"upstreams": {"other": {"url": fake_vllm.url, "models": {"gpt": "gpt"}}}}
    unpriced = settings_for(
        database_url, fake_vllm.url, tmp_path, learning={"starter": {"handover": handover}}, **values
    )
    prices = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 1.0}
    priced = unpriced.model_copy(
        update={"learning": {"starter": RewardSettings(handover=HandoverSettings(**handover, **prices))}}
    )
    for settings, saved in ((unpriced, "Set the teacher's prices"), (priced, "$0.0000 saved")):
        proxy = start(settings)
        if settings is unpriced:
            assert proxy.chat({"X-Trajectory-Id": "t"}, model="starter@v0").status_code == 200
            proxy.recorded()
        page = shown(Person(proxy).client.get("/ui/policies/starter"))
        assert "25 % of new trajectories are answered by starter, the others by gpt" in page
        assert "The shares are 25 %, 90 %" in page
        assert "starter has given 1 answers in its teacher's place, of 6 tokens" in page
        assert saved in page
        assert "Handover" not in shown(Person(proxy).client.get("/ui/policies/gpt"))


def test_a_baseline_is_laid_beside_the_curve(
    database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    values = {"upstreams": {"other": {"url": fake_vllm.url, "models": {"gpt": "gpt"}}}}
    proxy = start(settings_for(database_url, fake_vllm.url, tmp_path, **values))
    story = Story(proxy.engine, datetime.now(UTC))
    story.tell(8, 4)
    story.seed.trajectory("of gpt", None, turns=0, policy="gpt", reward=0.5, state="rewarded")
    person = Person(proxy)
    page = person.get("/ui/policies/starter?beside=gpt")
    curve = chart(page)
    assert curve["beside"] == {"name": "gpt", "y": [0.5] * len(curve["x"])}
    assert "gpt, training" in shown(page) and "Of gpt, training" in shown(page)
    alone = person.get("/ui/policies/starter")
    assert chart(alone)["beside"] is None and "Another policy beside it none gpt Show" in shown(alone)
    assert person.get("/ui/policies/starter?beside=starter").status_code == 404
    assert person.get("/ui/policies/starter?beside=<b>").status_code == 404
