"""The page of live requests and the overview: calls as the proxy records them, filters in the URL, nothing twice."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import pytest

from migrations import schema
from proxy.dashboard.pages.live import LISTED, read_filter, read_moment
from tests.conftest import Seed
from tests.unit.proxy.conftest import RunningProxy, wait_for
from tests.unit.proxy.ui_scene import HOSTILE
from whetstone.calls.store import Filter


def get(proxy: RunningProxy, path: str) -> str:
    answer = proxy.client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code}"
    return answer.text


def calls(page: str) -> list[str]:
    """The calls that a page lists, in order."""
    return re.findall(r'<tr data-call="([^"]+)">', page)


def cursor(page: str) -> int:
    match = re.search(r'data-follow="(\d+)"', page)
    assert match is not None
    return int(match[1])


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({}, Filter("p")),
        ({"policy": "a", "version": "v3", "task": "t"}, Filter("p", "a", None, "t", 3)),
        ({"state": "error", "key": "k", "min": "2,5"}, Filter("p", None, "error", None, None, "k", 2500.0)),
    ],
)
def test_filters_are_read_as_people_write_them(query: dict[str, str], wanted: Filter) -> None:
    assert read_filter("p", query) == (wanted, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("version", text) for text in ("x", "-1", "1" * 10)),
        *(("min", text) for text in ("much", "nan", "-1", "inf")),
        ("state", "lost"),
    ],
)
def test_a_filter_that_cannot_be_read_says_what_would_be_right(field: str, value: str) -> None:
    _, wrong = read_filter("p", {field: value})
    assert list(wrong) == [field] and wrong[field]


@pytest.mark.parametrize("text", [None, "", "x", "9" * 30, "1.5"])
def test_a_moment_that_is_none_is_none(text: str | None) -> None:
    assert read_moment(text) is None


def test_a_moment_before_all_calls_is_one_that_the_database_can_read(proxy: RunningProxy) -> None:
    assert calls(get(proxy, f"/ui/live?after=-{'9' * 20}")) == []
    assert read_moment("1500") == datetime.fromtimestamp(1.5, UTC)


def test_a_call_appears_once_it_is_recorded_and_the_next_look_has_only_new_calls(proxy: RunningProxy) -> None:
    before = get(proxy, "/ui/live")
    assert calls(before) == [] and "No call matches yet" in before
    completion_id = proxy.chat(messages=[{"role": "user", "content": "what is live?"}]).headers["x-completion-id"]
    proxy.recorded()
    after = get(proxy, f"/ui/live?after={cursor(before)}")
    assert calls(after) == [completion_id] and "what is live?" in after
    assert 'id="day"' not in after and 'id="day"' in get(proxy, "/ui/live")
    # A second later the overlap of two looks is over.
    assert calls(get(proxy, f"/ui/live?after={cursor(after) + 5000}")) == []


def test_the_cursor_waits_for_calls_that_are_not_in_the_tables(proxy: RunningProxy) -> None:
    page = get(proxy, "/ui/live")
    now_ms = datetime.now(UTC).timestamp() * 1000
    assert now_ms - 60_000 < cursor(page) <= now_ms


def test_filters_stay_in_the_url_and_choose(proxy: RunningProxy) -> None:
    seed = Seed(proxy.engine, datetime.now(UTC))
    seed.trajectory("a", task="billing")
    seed.trajectory("b", turns=0)
    seed.completion("b", 0, status="error", error="it broke", total_ms=9000.0, ttft_ms=20.0)
    assert calls(get(proxy, "/ui/live?task=billing")) == ["a-0"]
    page = get(proxy, "/ui/live?state=error&min=2.5&policy=starter&version=0")
    assert calls(page) == ["b-0"]
    assert 'name="min" value="2.5"' in page and '<option value="error" selected>' in page
    assert "9.0 s" in page and "20 ms" in page and 'title="it broke"' in page
    by_policy = unescape(page).partition("By policy")[2]
    assert '<a href="/ui/live?policy=starter&version=0&state=error&min=2.5">starter</a>' in by_policy
    wrong = get(proxy, "/ui/live?min=much")
    assert 'aria-invalid="true"' in wrong and "a duration is a number of seconds" in wrong and calls(wrong) == []


def test_a_call_leads_to_its_turn_of_the_conversation(proxy: RunningProxy) -> None:
    Seed(proxy.engine, datetime.now(UTC)).trajectory("talk", turns=2)
    page = get(proxy, "/ui/live")
    assert re.findall(r'href="(/ui/trajectories/talk[^"]*)"', page) == [
        "/ui/trajectories/talk?from=1#turn-1",
        "/ui/trajectories/talk",
    ]


def test_of_very_many_calls_the_last_are_listed_and_the_others_counted(proxy: RunningProxy) -> None:
    seed = Seed(proxy.engine, datetime.now(UTC) - timedelta(seconds=5))
    seed.trajectory("t", turns=0)
    seed.completion("t", 0)
    with proxy.engine.begin() as connection:
        row = dict(connection.execute(schema.completions.select()).mappings().one())
        many = [row | {"id": f"m{n:03}", "turn": n + 1, "created_at": seed.now} for n in range(LISTED + 20)]
        connection.execute(schema.completions.insert(), many)
    page = get(proxy, f"/ui/live?after={int(seed.now.timestamp() * 1000)}")
    assert len(calls(page)) == LISTED and f'data-ended="{LISTED + 21}"' in page


def test_what_apps_send_stays_text(proxy: RunningProxy) -> None:
    seed = Seed(proxy.engine, datetime.now(UTC))
    seed.trajectory("h", turns=0, task=HOSTILE)
    message = {"role": "user", "content": HOSTILE}
    seed.completion("h", 0, new_messages=[message], status="error", error=HOSTILE, key_id=HOSTILE)
    for path in ("/ui/live", "/ui/policies", "/ui/trajectories"):
        page = get(proxy, path)
        assert "<script>alert" not in page and "<img src=x" not in page and "&lt;script&gt;" in page, path


def test_the_overview_has_the_figures_of_the_day_and_the_newest_calls(proxy: RunningProxy) -> None:
    empty = get(proxy, "/ui/policies")
    assert 'id="overview-h"' not in empty
    seed = Seed(proxy.engine, datetime.now(UTC))
    for turn, (status, took) in enumerate((("complete", 1000.0), ("complete", 2000.0), ("error", 500.0))):
        seed.trajectory(f"t{turn}", turns=0, reward=1.0 if turn == 0 else None)
        seed.completion(f"t{turn}", 0, status=status, total_ms=took, created_at=seed.now + timedelta(milliseconds=turn))
    seed.feedback("t0", 1.0)
    page = get(proxy, "/ui/policies")
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
    assert (
        "Calls 3" in text and "Errors 1 33.3 % of calls" in text and "Duration, p95 2.0 s p50 1.0 s, newest 3" in text
    )
    assert "Feedback rate 33 % 1 of 3 trajectories have a reward; 1 feedback from apps and people" in text
    assert calls(page) == ["t2-0", "t1-0", "t0-0"] and "question 0" in text
    alone = get(proxy, "/ui/policies?part=overview")
    assert calls(alone) == calls(page) and 'id="policy-starter"' not in alone
    rest = get(proxy, "/ui/policies?part=policies")
    assert calls(rest) == [] and 'id="policy-starter"' in rest


def test_a_trajectory_is_listed_by_its_prompt_and_its_answer(proxy: RunningProxy) -> None:
    Seed(proxy.engine, datetime.now(UTC)).trajectory("f" * 58, turns=2)
    page = get(proxy, "/ui/trajectories")
    assert f'<a class="line" href="/ui/trajectories/{"f" * 58}">question 0</a>' in page
    assert '<span class="line muted">answer 1</span>' in page
    assert f'data-copy="{"f" * 58}"' in page


def test_the_next_look_has_a_call_that_began_long_before(proxy: RunningProxy) -> None:
    seed = Seed(proxy.engine, datetime.now(UTC))
    seed.trajectory("t", turns=0)
    after = cursor(get(proxy, "/ui/live"))
    seed.completion("t", 0, created_at=seed.now - timedelta(minutes=3), total_ms=181_000.0)
    wait_for(lambda: calls(get(proxy, f"/ui/live?after={after}")) == ["t-0"])
