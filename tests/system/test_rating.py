"""Rating and comparing in a real Chromium: by keyboard alone, without a reload, and without scripts."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from migrations import schema
from tests.system.conftest import Look
from tests.unit.proxy.conftest import RunningProxy, wait_for
from tests.unit.proxy.ui_scene import QUESTION, Scene

pytestmark = pytest.mark.system

FIFTY = 50
REWARDS = {"1": 0.0, "2": 0.25, "3": 0.5, "4": 0.75, "5": 1.0, "u": 1.0, "d": 0.0}
ON_SCREEN = """(id) => {
  const place = document.getElementById(id).getBoundingClientRect();
  const top = document.querySelector('header.top').getBoundingClientRect().bottom;
  return place.top >= top - 1 && place.top < innerHeight;
}"""


def attempts(proxy: RunningProxy, count: int, group: str | None = None) -> list[str]:
    """Attempts that wait for a rating, the newest first."""
    scene = Scene(proxy.engine, datetime.now(UTC) - timedelta(hours=1))
    if group is not None:
        scene.group(group, target_size=count)
    names = [f"rate-{place:02}" for place in range(count)]
    for place, name in enumerate(names):
        scene.attempt(name, group, created_at=scene.now - timedelta(seconds=place))
        scene.says(name, 0, [{"role": "user", "content": QUESTION}], f"It arrives at {place}.")
    return names


def ratings(proxy: RunningProxy) -> dict[str, Any]:
    f = schema.feedback
    with proxy.engine.connect() as connection:
        rows = connection.execute(select(f).where(f.c.target_id.startswith("rate-")).order_by(f.c.created_at)).all()
    return {row.target_id: row for row in rows}


def test_fifty_attempts_are_rated_by_keyboard(look_at_own: Look, own: RunningProxy) -> None:
    names = attempts(own, FIFTY)
    page = look_at_own().go("/ui/rate")
    expected = {}
    for number, name in enumerate(names):
        before = page.url
        page.keyboard.press("j")
        if number and number % 20 == 0:  # the last one of the page was rated: more are loaded
            page.wait_for_url(lambda url, before=before: url != before)
            page.wait_for_load_state("load")
            page.keyboard.press("j")
        card = page.evaluate("() => document.activeElement.id")
        assert page.locator(f"#{card} h2").inner_text() == name
        assert page.evaluate(ON_SCREEN, card), name
        if number % 10 == 3:
            page.keyboard.press("c")
            page.keyboard.type("12u: just words")
            page.keyboard.press("Escape")
        key = list(REWARDS)[number % len(REWARDS)]
        page.keyboard.press(key)
        page.locator(f"#{card} [data-status]").filter(has_text="Saved").wait_for()
        assert page.locator(f"#{card} [aria-pressed=true]").get_attribute("aria-keyshortcuts") == key
        shown = page.locator(f"#{card} [data-reward]").inner_text().split()
        assert float(shown[2]) == REWARDS[key] and shown[3:] == ["from", "your", "rating"], "the card shows it at once"
        expected[name] = (REWARDS[key], "12u: just words" if number % 10 == 3 else None)
    assert {name: (row.reward, row.comment) for name, row in ratings(own).items()} == expected
    page.goto(page.url.partition("?")[0])
    page.get_by_role("heading", name="Nothing to rate").wait_for()


def test_k_goes_back_and_the_last_key_counts(look_at_own: Look, own: RunningProxy) -> None:
    names = attempts(own, 3, "to-rate")
    page = look_at_own().go("/ui/groups/to-rate")
    for key in ("j", "j", "5", "k", "d", "u", "2"):
        page.keyboard.press(key)
    cards = page.locator("[data-attempt]")
    wait_for(lambda: len(ratings(own)) == 2)
    page.locator("[data-status]").filter(has_text="Saved: score 2").wait_for()
    assert sorted(row.reward for row in ratings(own).values()) == [0.25, 1.0]
    assert cards.count() == len(names)
    # The part that brings itself up to date shows the same.
    with page.expect_response(lambda answer: answer.url.endswith("/ui/groups/to-rate")):
        pass
    page.wait_for_timeout(300)
    pressed = page.locator("[aria-pressed=true]").evaluate_all("(all) => all.map((one) => one.value)")
    assert sorted(pressed) == ["2", "5"]


def test_a_comment_that_is_being_written_stays(look_at_own: Look, own: RunningProxy) -> None:
    attempts(own, 1)
    page = look_at_own().go("/ui/trajectories/rate-00")
    page.keyboard.press("c")
    page.keyboard.type("vague")
    page.keyboard.press("Escape")
    page.wait_for_timeout(4500)
    assert page.locator("#rate-attempt textarea[name=comment]").input_value() == "vague"
    page.keyboard.press("2")
    page.locator("#rate-attempt [data-status]").filter(has_text="Saved: score 2").wait_for()
    row = ratings(own)["rate-00"]
    assert (row.comment, row.target_kind) == ("vague", "trajectory")
    page.keyboard.press("j")
    page.keyboard.press("u")
    page.locator("#turn-0 [data-status]").filter(has_text="Saved: thumbs up").wait_for()
    assert ratings(own)["rate-00-0"].target_kind == "completion"


def test_without_scripts_a_form_is_enough(look_at_own: Look, own: RunningProxy) -> None:
    attempts(own, 1)
    page = look_at_own(java_script_enabled=False).go("/ui/trajectories/rate-00")
    page.locator("#rate-attempt summary").first.click()
    page.locator("#rate-attempt").get_by_label("Right answer").fill("At 12:15.")
    page.locator("#rate-attempt").get_by_role("button", name="Save").click()
    page.get_by_role("status").filter(has_text="Saved: the right answer").wait_for()
    assert page.url.endswith("/ui/trajectories/rate-00")
    assert ratings(own)["rate-00"].demonstration == {"role": "assistant", "content": "At 12:15."}


def test_a_rating_that_is_not_stored_says_so(look_at_own: Look, own: RunningProxy) -> None:
    attempts(own, 1)
    looking = look_at_own()
    page = looking.go("/ui/rate")
    page.route("**/ui/rate/trajectory/*", lambda route: route.abort())
    page.keyboard.press("5")
    page.get_by_text("Not saved: the proxy does not answer").wait_for()
    assert page.locator("[aria-pressed=true]").count() == 0
    # The browser itself tells of the request that failed.
    looking.wrong[:] = [one for one in looking.wrong if "net::ERR_FAILED" not in one]


def test_two_versions_are_compared_and_one_is_preferred(look_at_own: Look, own: RunningProxy) -> None:
    page = look_at_own().go("/ui/compare")
    page.get_by_label("Prompt").fill(QUESTION)
    page.locator("select[name=a]").select_option("starter@v0")
    page.locator("select[name=b]").select_option("starter")
    page.get_by_label("Answers of each").fill("3")
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url("**/ui/compare/compare-*")
    page.wait_for_function("() => document.querySelectorAll('.preference').length === 3")
    page.get_by_role("button", name="B is better").nth(1).click()
    page.get_by_text("Saved: B is better").wait_for()
    rows = own.rows(schema.feedback)
    assert {(row.target_id.rpartition(".")[2], row.reward) for row in rows} == {("a2", 0.0), ("b2", 1.0)}
    page.keyboard.press("j")
    page.keyboard.press("4")
    page.locator("#answer-a1 [data-status]").filter(has_text="Saved: score 4").wait_for()
