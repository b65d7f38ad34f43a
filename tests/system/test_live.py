"""The live page in a real Chromium: calls come without a reload, pause, and stay where the pointer is."""

import pytest

from tests.system.conftest import Look
from tests.unit.proxy.conftest import RunningProxy, wait_for

pytestmark = pytest.mark.system

LOOKS_MS = 2500
"""A little more than the page waits between two looks."""


def chat(proxy: RunningProxy, text: str) -> None:
    """Send a request, and return once it is recorded."""
    completion_id = proxy.chat(messages=[{"role": "user", "content": text}]).headers["x-completion-id"]
    wait_for(lambda: bool(proxy.rows(id=completion_id)))


def test_calls_come_without_a_reload_and_a_pause_stops_them(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/live")
    page.evaluate("() => { window.sameDocument = true; }")
    chat(own, "is this live?")
    row = page.get_by_role("link", name="is this live?")
    row.wait_for()
    page.get_by_role("button", name="Pause").click()
    chat(own, "and while it is paused?")
    page.wait_for_timeout(LOOKS_MS)
    assert page.get_by_role("link", name="and while it is paused?").count() == 0
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("link", name="and while it is paused?").wait_for()
    assert row.count() == 1 and page.evaluate("() => window.sameDocument") is True
    page.get_by_role("link", name="is this live?").click()
    page.get_by_role("heading", name="Turn 1").wait_for()


def test_rows_hold_still_under_the_pointer(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/live")
    chat(own, "first")
    page.get_by_role("link", name="first").hover()
    chat(own, "second")
    page.wait_for_timeout(LOOKS_MS)
    assert page.get_by_role("link", name="second").count() == 0
    page.get_by_role("heading", level=1).hover()
    page.get_by_role("link", name="second").wait_for()


def test_filters_hold_for_new_calls_and_stay_in_the_address(look_at_own: Look, own: RunningProxy) -> None:
    looking = look_at_own()
    page = looking.go("/ui/live")
    page.locator("select[name=state]").select_option("error")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/ui/live?*state=error*")
    chat(own, "this one is complete")
    page.wait_for_timeout(2 * LOOKS_MS)
    assert page.locator("[data-call]").count() == 0
    page.get_by_text("No call matches yet").wait_for()


def test_an_id_is_copied(look: Look) -> None:
    looking = look(permissions=["clipboard-read", "clipboard-write"])
    page = looking.go("/ui/trajectories")
    button = page.locator("[data-copy]").first
    button.click()
    page.get_by_role("status").filter(has_text="Copied").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == button.get_attribute("data-copy")
