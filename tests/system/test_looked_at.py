"""Conversations and reviews in a real Chromium: what is folded opens, what is asked for comes, what is said counts."""

from datetime import UTC, datetime

import pytest

from tests.system.conftest import Look
from tests.unit.proxy.conftest import RunningProxy
from tests.unit.proxy.ui_scene import Scene, fill

pytestmark = pytest.mark.system


def test_the_middle_of_a_long_conversation_comes_without_a_reload(look: Look) -> None:
    looking = look()
    page = looking.go("/ui/trajectories/long")
    page.evaluate("() => { window.sameDocument = true; }")
    assert page.locator(".turn").count() == 10
    while page.locator("#gap").count():
        before = page.locator(".turn").count()
        page.locator("#gap a").click()
        page.wait_for_function(f"() => document.querySelectorAll('.turn').length > {before}")
    numbers = page.locator(".turn").evaluate_all("(all) => all.map((one) => Number(one.id.split('-')[1]))")
    assert numbers == list(range(40))
    assert page.evaluate("() => window.sameDocument") is True


def test_the_middle_is_reached_without_scripts_too(look: Look) -> None:
    looking = look(java_script_enabled=False)
    page = looking.go("/ui/trajectories/long")
    page.locator("#gap a").click()
    assert page.locator("#turn-2").is_visible()
    page.get_by_role("link", name="The whole trajectory").click()
    assert page.locator("#turn-39").is_visible()


def test_a_tool_call_is_folded_and_opens(look: Look) -> None:
    looking = look()
    page = looking.go("/ui/trajectories/agent")
    call = page.locator("details.fold-call").first
    assert not call.locator("pre").is_visible()
    call.locator("summary").focus()
    page.keyboard.press("Enter")
    assert call.locator("pre").is_visible() and "ICE 17" in call.locator("pre").inner_text()


@pytest.mark.parametrize("scripts", [True, False])
def test_tokens_change_their_colour_by_a_link(look: Look, scripts: bool) -> None:
    looking = look(java_script_enabled=scripts)
    page = looking.go("/ui/trajectories/trains-17-0")
    colours = "(all) => [...new Set(all.map((one) => getComputedStyle(one).backgroundColor))].length"
    assert page.locator(".tokens span").evaluate_all(colours) > 2
    page.get_by_role("link", name="Advantage").click()
    assert page.locator(".tokens span").evaluate_all(colours) == 1
    page.get_by_role("link", name="Plain text").click()
    assert page.locator(".tokens").count() == 0


def test_the_funnel_leads_to_examples(look: Look) -> None:
    looking = look()
    page = looking.go("/ui/funnel")
    page.get_by_role("link", name="group_uniform").click()
    page.get_by_role("row").filter(has_text="same-1").wait_for()
    assert page.locator("tbody tr").count() == 2


@pytest.mark.parametrize("how", ["reward", "thumbs"])
def test_what_is_said_by_keyboard_is_feedback(look_at_own: Look, own: RunningProxy, how: str) -> None:
    fill(Scene(own.engine, datetime.now(UTC)))
    looking = look_at_own()
    page = looking.go("/ui/reviews")
    page.get_by_label("Comment").fill("short and right")
    if how == "reward":
        page.get_by_role("textbox", name="Reward").fill("0.75")
    else:
        page.get_by_role("button", name="Thumbs up").focus()
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(
        has_text="Saved: reward 0.75" if how == "reward" else "Saved: thumbs up"
    ).wait_for()
    page.get_by_role("heading", name="No attempts wait for a review").wait_for()
    page.goto(looking.url + f"/ui/feedback?source={how}&state=waiting")
    row = page.get_by_role("row").filter(has_text="to-look-at")
    assert "short and right" in row.inner_text()
