"""Every page in a real Chromium: it shows, breaks no rule of accessibility, and fits, light and dark, wide and narrow.

Structure is compared with what stands in structure/: WHETSTONE_KEEP=1 keeps what is there now instead.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.dashboard.pages.registry import NAV, PAGES
from tests.system.conftest import Look
from tests.system.pages import VISITS, Visit

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
AXE = (HERE / "vendor" / "axe.min.js").read_text(encoding="utf-8")
STRUCTURES = HERE / "structure"
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
SIZES = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 800}}
STRUCTURE = """() => [...document.querySelectorAll(
    'h1, h2, h3, nav, header, main, section, article, form, table, th[scope=col], button, label, summary, figure')]
  .filter((one) => one.checkVisibility())
  .map((one) => {
    const text = /^(H1|H2|H3|TH|BUTTON|LABEL|SUMMARY)$/.test(one.tagName)
      ? one.textContent : one.getAttribute('aria-label') || '';
    return one.tagName.toLowerCase() + ' ' + text.replace(/\\s+/g, ' ').trim();
  })"""
BOXES = """() => {
  const box = (one) => one && one.getBoundingClientRect();
  const top = box(document.querySelector('header.top')), main = box(document.querySelector('main'));
  const cards = [...document.querySelectorAll('.card')].map(box).filter((one) => one.width);
  const wide = [...document.querySelectorAll('main *')].filter((one) => {
    if (one.closest('.plot, .sr, svg')) return false;
    for (let up = one.parentElement; up !== document.body; up = up.parentElement) {
      if (getComputedStyle(up).overflowX !== 'visible') return false;
    }
    const place = one.getBoundingClientRect();
    return place.width && place.right > innerWidth + 1;
  }).map((one) => one.outerHTML.slice(0, 120));
  const lap = cards.some((a, i) => cards.slice(i + 1).some((b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
  return { under: main.top >= top.bottom - 1, lap, wide, scrolls: document.documentElement.scrollWidth > innerWidth };
}"""


def the(visit: Visit) -> str:
    return visit.url


def test_every_page_that_is_served_is_visited() -> None:
    visited = {visit.page for visit in VISITS}
    assert {page.path for page in PAGES} == visited


def test_each_link_of_the_navigation_leads_to_its_page(look: Look) -> None:
    looking = look()
    page = looking.go("/ui")
    for label, path in NAV:
        page.get_by_role("navigation", name="Pages").get_by_role("link", name=label, exact=True).click()
        page.wait_for_url(f"**{path}")
        assert page.locator("nav [aria-current=page]").inner_text() == label
        looking.settled()


@pytest.mark.parametrize("visit", VISITS, ids=the)
def test_a_page_shows_what_it_is_about(look: Look, visit: Visit) -> None:
    looking = look()
    page = looking.go(visit.url)
    looking.settled()
    assert page.locator("h1").count() == 1
    assert visit.heading in page.locator("h1").inner_text()
    assert page.title().endswith("· Whetstone")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("visit", VISITS, ids=the)
def test_axe_finds_nothing_wrong(look: Look, visit: Visit, scheme: str) -> None:
    looking = look(color_scheme=scheme)
    page = looking.go(visit.url)
    looking.settled()
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(AXE)
    results: Any = page.evaluate("(tags) => axe.run(document, { runOnly: { type: 'tag', values: tags } })", list(RULES))
    assert [_wrong(one) for one in results["violations"]] == []


def _wrong(violation: dict[str, Any]) -> str:
    nodes = violation["nodes"]
    return f"{violation['id']}: {len(nodes)} like {nodes[0]['html'][:160]} {nodes[0].get('failureSummary', '')[:200]}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("visit", VISITS, ids=the)
def test_a_page_fits_its_window(look: Look, visit: Visit, size: str) -> None:
    looking = look(viewport=SIZES[size])
    page = looking.go(visit.url)
    looking.settled()
    assert page.evaluate(BOXES) == {"under": True, "lap": False, "wide": [], "scrolls": False}


@pytest.mark.parametrize("visit", VISITS, ids=the)
def test_a_page_is_built_as_it_was(look: Look, visit: Visit) -> None:
    looking = look()
    page = looking.go(visit.url)
    looking.settled()
    built = page.evaluate(STRUCTURE)
    path = STRUCTURES / (re.sub(r"[^a-z0-9]+", "-", visit.url.removeprefix("/ui/")) + ".json")
    if os.environ.get("WHETSTONE_KEEP"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(built, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    assert built == json.loads(path.read_text(encoding="utf-8")), "if it is meant: WHETSTONE_KEEP=1 keeps it"


def test_hostile_words_are_only_words(look: Look) -> None:
    looking = look()
    for visit in VISITS:
        page = looking.go(visit.url)
        looking.settled()
        assert page.locator("script:not([src]):not([type='application/json'])").count() == 0, visit.url
        assert page.locator("main img").count() == 0, visit.url


def test_a_browser_without_scripts_shows_all_but_the_charts(look: Look) -> None:
    looking = look(java_script_enabled=False)
    for visit in VISITS:
        page = looking.go(visit.url)
        assert page.locator("h1").count() == 1
