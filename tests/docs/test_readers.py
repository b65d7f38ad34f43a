"""Three readers have a path of five pages each; the entry page, the menu and llms.txt name the same pages."""

import re
import tomllib
from pathlib import Path

import pytest

from docs.make_site import add_text
from tests.docs_blocks import ROOT

DOCS = ROOT / "docs"
READERS = ("App developer", "Operator", "ML engineer")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")


def path_of(reader: str) -> list[tuple[str, str]]:
    """Return title and file name of a reader's pages, in the menu's order."""
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    pages = next(entry[reader] for entry in nav if reader in entry)
    return [(title, Path(page).name) for entry in pages for title, page in entry.items()]


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_has_five_pages_and_the_entry_page_lists_them_in_order(reader: str) -> None:
    entry = (DOCS / "README.md").read_text(encoding="utf-8")
    assert len(path_of(reader)) == 5
    assert LINK.findall(section(entry, reader)) == path_of(reader)


@pytest.mark.parametrize("reader", READERS)
def test_each_page_of_a_path_leads_to_the_next(reader: str) -> None:
    pages = path_of(reader)
    for place, (_, page) in enumerate(pages):
        line = (DOCS / page).read_text(encoding="utf-8").splitlines()[2]
        assert f"page {place + 1} of 5." in line, page
        home, following = LINK.findall(line.replace(f"#{reader.lower().replace(' ', '-')}", ""))
        assert home == (reader, "README.md")
        assert following == (pages[place + 1] if place < 4 else ("all pages", "README.md")), page


def test_no_page_is_on_two_paths() -> None:
    pages = [page for reader in READERS for _, page in path_of(reader)]
    assert len(set(pages)) == len(pages)


def test_the_entry_page_lists_every_page_of_the_docs() -> None:
    linked = {link for _, link in LINK.findall((DOCS / "README.md").read_text(encoding="utf-8"))}
    assert {page.name for page in DOCS.glob("*.md")} - linked == {"README.md"}


def test_llms_txt_lies_at_the_top_of_the_site_and_its_links_lead_to_the_text_of_pages(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for folder in (pages, site):
            (folder / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (pages / page.relative_to(ROOT)).write_bytes(page.read_bytes())
    add_text(pages, site)
    links = [link for _, link in LINK.findall((site / "llms.txt").read_text(encoding="utf-8"))]
    assert len(links) > 40
    assert [link for link in links if not (site / link).is_file()] == []
