"""The home page of a new stack in a real Chromium: it turns as calls come, is accessible, and fits."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system.conftest import Look, Looking, opened_by, running
from tests.system.test_pages import AXE, BOXES, RULES, SIZES
from tests.unit.proxy.conftest import RunningProxy

if TYPE_CHECKING:  # the environment of the other tests has no Playwright
    from playwright.sync_api import Browser, BrowserContext

pytestmark = pytest.mark.system


@pytest.fixture
def new(sqlite_template: Path, tmp_path: Path) -> Iterator[RunningProxy]:
    """A proxy that nothing was ever sent to."""
    proxy, fake = running(sqlite_template, tmp_path)
    yield proxy
    proxy.stop()
    fake.close()


@pytest.fixture
def look_at_new(browser: "Browser", new: RunningProxy, opened: "list[tuple[BrowserContext, Looking]]") -> Look:
    return opened_by(browser, new.url, opened)


def test_the_page_turns_as_calls_come_without_a_reload(look_at_new: Look, new: RunningProxy) -> None:
    page = look_at_new().go("/ui/policies")
    page.evaluate("() => { window.sameDocument = true; }")
    page.get_by_role("heading", name="Send the first call").wait_for()
    assert f'base_url="{new.url}/v1"' in page.locator("pre").first.inner_text()
    first = new.chat({"X-Trajectory-Id": "first"})
    assert first.status_code == 200
    page.get_by_role("heading", name="We see your first call").wait_for()
    assert page.get_by_role("link", name="first", exact=True).is_visible()
    for name in ("a", "b"):
        new.chat({"X-Trajectory-Id": name, "X-Group-Id": "g"})
    page.get_by_role("heading", name="What is missing until the first step").wait_for()
    page.locator("li", has_text="1 group of two or more attempts.").wait_for()
    assert "Rewards" in page.locator("li[aria-current=step]").inner_text()
    assert page.evaluate("() => window.sameDocument") is True


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_breaks_no_rule_and_fits(look_at_new: Look, new: RunningProxy, calls: int, scheme: str) -> None:
    for _ in range(calls):
        new.chat({"X-Trajectory-Id": "first"})
        new.recorded()
    for size in SIZES.values():
        looking = look_at_new(color_scheme=scheme, viewport=size)
        page = looking.go("/ui/policies")
        looking.settled()
        page.evaluate(AXE)
        results = page.evaluate("(tags) => axe.run(document, {runOnly: {type: 'tag', values: tags}})", list(RULES))
        assert [(one["id"], one["nodes"][0]["html"][:160]) for one in results["violations"]] == []
        assert page.evaluate(BOXES) == {"under": True, "lap": False, "wide": [], "scrolls": False}
