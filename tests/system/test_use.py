"""The dashboard used: by keyboard alone, in the dark, while things happen, with a key and without."""

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from tests.system.conftest import Look, make_key
from tests.unit.proxy.conftest import RunningProxy, wait_for
from tests.unit.proxy.ui_story import Story

if TYPE_CHECKING:  # the environment of the other tests has no Playwright
    from playwright.sync_api import Route

pytestmark = pytest.mark.system

FOCUS = """() => {
  const one = document.activeElement, style = getComputedStyle(one), place = one.getBoundingClientRect();
  const name = one.getAttribute('aria-label') || one.textContent || one.name || '';
  return { name: name.replace(/\\s+/g, ' ').trim().slice(0, 60),
           tag: one.tagName, ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
           seen: place.bottom > 0 && place.top < innerHeight };
}"""


def test_what_happens_is_seen_without_a_reload(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/policies")
    looking.settled()
    page.evaluate("() => { window.sameDocument = true; }")
    card = page.get_by_role("article", name="agent")
    card.get_by_text("View as table").click()
    plot = card.locator("[data-chart]")
    before = plot.locator("canvas").evaluate("(one) => one.toDataURL()")
    story = Story(own.engine, datetime.now(UTC), policy="agent")
    story.version(7, 6, story.now)
    story.step(7, 6, story.now)
    story.rewarded(7, 6, story.now, worth=0.9)
    story.live(7, 7)
    page.wait_for_function("() => document.querySelector(\"[data-fact='live version of agent']\").textContent === '7'")
    page.wait_for_function(
        "() => /live version of agent: 7/.test(document.querySelector('[data-announce]').textContent)"
    )
    assert plot.locator("canvas").count() == 1
    assert plot.locator("canvas").evaluate("(one) => one.toDataURL()") != before
    assert page.evaluate("() => window.sameDocument") is True
    assert card.locator("details").get_attribute("open") is not None, "what was open stays open"
    assert card.get_by_role("row").filter(has_text="live").count() == 1


def test_a_poll_that_fails_blanks_nothing_and_the_next_one_goes_on(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/policies")
    looking.settled()
    polled: list[str] = []

    def fail(route: "Route") -> None:
        polled.append(route.request.url)
        route.fulfill(status=503, content_type="text/html", body="<title>away</title><p>The database is away.</p>")

    page.route("**/ui/policies*", fail)
    page.wait_for_timeout(5000)
    assert polled, "it asked again"
    assert page.get_by_role("article", name="agent").is_visible()
    assert "away" not in page.title()
    page.unroute("**/ui/policies*")
    # The browser itself tells of each such answer; nothing else is wrong.
    assert all("503" in one for one in looking.wrong)
    looking.wrong.clear()
    story = Story(own.engine, datetime.now(UTC), policy="agent")
    story.version(7, 6, story.now)
    story.step(7, 6, story.now)
    story.live(7, 7)
    page.wait_for_function("() => document.querySelector(\"[data-fact='live version of agent']\").textContent === '7'")


def test_everything_can_be_done_with_the_keyboard(look: Look) -> None:
    looking = look()
    page = looking.go("/ui/policies")
    looking.settled()
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS)["name"] == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "main"
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if at["tag"] == "BODY":
            break
        assert at["ring"] and at["seen"], at
        reached.append(at["name"])
    assert {"agent", "Train", "Record only", "Pause", "View as table", "Step 24"} <= set(reached)
    page.get_by_role("link", name="agent", exact=True).focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/policies/agent")
    page.get_by_text("Roll back", exact=True).first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "to"


def test_focus_stays_where_it_is_while_the_page_is_brought_up_to_date(look: Look) -> None:
    looking = look()
    page = looking.go("/ui/policies")
    looking.settled()
    button = page.get_by_role("article", name="agent").get_by_role("button", name="Pause")
    button.focus()
    with page.expect_response(lambda answer: answer.url.endswith("/ui/policies?part=policies")):
        pass
    with page.expect_response(lambda answer: answer.url.endswith("/ui/policies?part=policies")):
        pass
    assert page.evaluate(FOCUS)["name"] == "Pause"


def test_a_theme_that_is_chosen_stays(look: Look) -> None:
    looking = look(color_scheme="light")
    page = looking.go("/ui/policies")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    toggle = page.get_by_role("button", name="Theme")
    toggle.click()
    assert page.evaluate(ground) == light and "light" in toggle.inner_text()
    toggle.click()
    dark = page.evaluate(ground)
    assert dark != light and "dark" in toggle.inner_text()
    page.reload()
    assert page.evaluate(ground) == dark


def test_nothing_moves_for_who_wants_that(look: Look) -> None:
    looking = look(reduced_motion="reduce")
    page = looking.go("/ui/policies")
    moves = (
        "() => [...document.querySelectorAll('*')].some((one) => parseFloat(getComputedStyle(one).transitionDuration))"
    )
    assert page.evaluate(moves) is False


def test_a_policy_is_paused_and_says_so(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/policies")
    page.get_by_role("article", name="agent").get_by_role("button", name="Pause").click()
    page.get_by_role("status").filter(has_text="agent is paused").wait_for()
    assert (
        page.get_by_role("article", name="agent").get_by_role("button", name="Pause").get_attribute("aria-pressed")
        == "true"
    )


def test_a_rollback_asks_first_and_says_where_it_went(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/policies/agent")
    looking.settled()
    page.get_by_text("Roll back", exact=True).first.click()
    page.get_by_label("To version").fill("0")
    page.get_by_label("Reason").first.fill("it swears")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("status").filter(has_text="agent is back at version 0").wait_for()
    assert page.locator("tr[aria-current]").locator("th").inner_text() == "0"


def test_what_is_refused_is_said(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/policies/agent")
    page.get_by_text("Promote a version").click()
    page.get_by_label("Version", exact=True).fill("99")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Promote").click()
    assert "agent has no version 99" in page.get_by_role("alert").inner_text()


def test_with_keys_one_signs_in_and_out(look_at_own: Look, own: RunningProxy) -> None:
    admin, app = make_key(own.engine, "admin"), make_key(own.engine, "inference")
    wait_for(lambda: own.client.get("/v1/models").status_code == 401)
    looking = look_at_own()
    page = looking.page
    page.goto(looking.url + "/ui/policies/agent")
    assert page.url.endswith("/ui/sign-in?next=/ui/policies/agent")
    for key, message in (("wsk_no", "opens nothing here"), (app, "needs a key with the scope admin")):
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text=message).wait_for()
    # A browser notes answers of 401 and 403 by itself.
    looking.wrong[:] = [one for one in looking.wrong if not re.search("status of 40[13]", one)]
    page.get_by_label("API key").fill(admin)
    page.keyboard.press("Enter")
    page.wait_for_url("**/ui/policies/agent")
    (cookie,) = [one for one in page.context.cookies() if one["name"] == "whetstone_ui"]
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
    assert admin not in cookie["value"] and admin.split("_")[2] not in cookie["value"]
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/ui/sign-in")
    page.goto(looking.url + "/ui/policies")
    assert page.url.endswith("/ui/sign-in?next=/ui/policies")
