"""From an empty database to the first step, on the home page: what to paste, and what comes next after each call."""

import html
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from migrations import schema
from proxy.dashboard.pages import first_run
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, identified, wait_for
from tests.unit.proxy.dashboard.test_middleware import Person, make_key
from tests.unit.proxy.ui_story import HOSTILE, Story


@pytest.fixture
def person(proxy: RunningProxy) -> Iterator[Person]:
    person = Person(proxy)
    yield person
    person.client.close()


@pytest.fixture
def seed(proxy: RunningProxy) -> Seed:
    """Rows of a policy that only records, as of a new stack."""
    set_state(proxy, "recording")
    return Seed(proxy.engine, datetime.now(UTC) - timedelta(seconds=30))


def set_state(proxy: RunningProxy, state: str) -> None:
    with proxy.engine.begin() as connection:
        connection.execute(update(schema.policies).values(state=state))


def part(person: Person) -> str:
    """The part of the page, as it is read; empty if it is not there."""
    match = re.search(r'<div id="first-run".*?</ol>', person.get("/ui/policies").text, re.DOTALL)
    return "" if match is None else html.unescape(" ".join(re.sub(r"<[^>]+>", " ", match[0]).split()))


def lines_to_paste(person: Person) -> str:
    return html.unescape(re.findall(r"<pre[^>]*><code>(.*?)</code>", person.get("/ui/policies").text, re.DOTALL)[0])


def next_one(person: Person) -> str:
    """The milestone that comes next: what it says."""
    text = part(person)
    assert text.count(" next ") == 1
    return re.split(r" (?:missing|done) ", text.partition(" next ")[2])[0]


def test_an_empty_page_has_the_lines_to_paste_with_the_address_of_the_browser(
    seed: Seed, proxy: RunningProxy, person: Person
) -> None:
    text = part(person)
    assert text.startswith("Send the first call") and next_one(person).startswith("Calls None is recorded yet.")
    code = lines_to_paste(person)
    assert f'base_url="{proxy.url}/v1", api_key="none"' in code and 'model="starter"' in code and "/feedback" in code
    elsewhere = person.get("/ui/policies", host="localhost:9123").text
    assert 'base_url="http://localhost:9123/v1"' in html.unescape(elsewhere)
    assert "Nothing recorded yet" not in elsewhere, "the card of the policy does not repeat it"


def test_the_lines_to_paste_run_and_reward_a_group(
    seed: Seed, proxy: RunningProxy, fake_vllm: FakeVllm, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fake_vllm.script = identified
    exec(compile(lines_to_paste(person), "pasted", "exec"), {})
    wait_for(lambda: "8 attempts recorded." in part(person))
    assert "1 group of two or more attempts." in part(person)
    assert [row.choice for row in proxy.rows(schema.feedback)] == [*range(8)]


def test_with_keys_the_page_says_where_to_get_one(seed: Seed, proxy: RunningProxy, person: Person) -> None:
    person.sign_in(make_key(proxy, "admin"))
    text = part(person)
    assert 'api_key="…"' in text and "whetstone keys create --name app --scope inference --scope feedback" in text


def test_the_first_call_is_seen_and_leads_on(seed: Seed, proxy: RunningProxy, person: Person) -> None:
    trajectory = proxy.chat().headers["x-trajectory-id"]
    wait_for(lambda: part(person).startswith("We see your first call"))
    assert f'href="/ui/trajectories/{trajectory}"' in person.get("/ui/policies").text
    assert "1 attempt recorded." in part(person)
    assert next_one(person).startswith("Groups No two attempts are compared yet.")
    proxy.chat({"X-Group-Id": "g"})
    proxy.chat({"X-Group-Id": "g"})
    wait_for(lambda: "3 attempts recorded." in part(person))
    assert part(person).startswith("What is missing until the first step")


def test_from_a_group_to_the_step_each_milestone_has_its_remedy(
    seed: Seed, proxy: RunningProxy, person: Person
) -> None:
    seed.group("g")
    for member in ("a", "b"):
        seed.trajectory(member, "g", turns=0)
    assert "1 group of two or more attempts." in part(person)
    assert next_one(person).startswith("Rewards 0 of 2 attempts rewarded. Post feedback")
    with proxy.engine.begin() as connection:
        rewarded = {"state": "rewarded", "reward": 1.0, "why_not_trained": "policy_not_training"}
        connection.execute(update(schema.trajectories).values(rewarded))
        scored = {"state": "scored", "size": 2, "rewarded": 2, "reward_spread": 0.5, "closed_at": seed.now}
        connection.execute(update(schema.groups).values(compared_with="group", **scored))
    assert next_one(person).startswith("Training It is off")
    set_state(proxy, "training")
    assert next_one(person).startswith("First step 1 of the 12 scored groups that start a step are there.")


def test_once_a_step_was_taken_the_part_is_gone(proxy: RunningProxy, person: Person) -> None:
    Story(proxy.engine, datetime.now(UTC)).tell(1, 2)
    assert part(person) == ""


def test_it_is_folded_once_much_is_recorded(seed: Seed, person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "FOLDED_FROM", 2)
    seed.trajectory("a", turns=0)
    assert '<details class="card" open>' in person.get("/ui/policies").text
    seed.trajectory("b", turns=0)
    assert '<details class="card">' in person.get("/ui/policies").text


def test_what_is_hostile_stays_words(seed: Seed, person: Person) -> None:
    seed.trajectory(HOSTILE, turns=0)
    assert HOSTILE not in person.get("/ui/policies").text
