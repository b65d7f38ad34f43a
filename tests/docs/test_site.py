"""The documentation as a site: it builds strictly, its menu is whole, every link leads somewhere, none outside."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs_blocks import ROOT, pages

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""What a browser fetches by itself."""


class Page(HTMLParser):
    """The links, fetched files and anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.anchors.add(str(values["id"]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        if tag in LOADED and values.get(LOADED[tag]):
            self.loads.append(str(values[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs" / "make_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def read(site: Path) -> dict[Path, Page]:
    """Every page of it; 404.html is served from any place and holds absolute links."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def menu(entries: Any) -> Iterator[str]:
    """The pages that the menu names."""
    for entry in entries:
        for target in entry.values():
            yield from menu(target) if isinstance(target, list) else [target]


def named() -> list[str]:
    return list(menu(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))


def test_the_menu_names_pages_that_are_there_once_each() -> None:
    listed = named()
    assert len(set(listed)) == len(listed)
    missing = [page for page in listed if page != "index.md" and not (ROOT / page).is_file()]
    assert not missing


def test_every_page_is_in_the_menu_or_listed_by_one_that_is() -> None:
    decisions = {f"docs/decisions/{page.name}" for page in (ROOT / "docs" / "decisions").glob("0*.md")}
    left_out = {str(page.relative_to(ROOT)) for page in pages()} - set(named()) - decisions - {"README.md"}
    assert not left_out


def test_every_link_leads_somewhere(site: Path, read: dict[Path, Page]) -> None:
    dead = []
    for path, page in read.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            there = target.exists() and (target.suffix != ".html" or not anchor or anchor in read[target].anchors)
            if not there:
                dead.append(f"{path.relative_to(site)} -> {link}")
    assert not dead, "\n".join(dead)


def test_a_page_is_read_without_a_network(read: dict[Path, Page]) -> None:
    outside = {load for page in read.values() for load in page.loads if urlsplit(load).netloc}
    assert not outside


def test_pictures_are_on_the_site(site: Path) -> None:
    assert (site / "docs" / "how_it_works.svg").is_file() and (site / "docs" / "rewards.png").is_file()
