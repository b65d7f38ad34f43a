"""The pages that are made from the code are up to date."""

import re

import pytest

from docs.build.__main__ import DOCS, pages


@pytest.mark.parametrize("name", pages())
def test_a_page_says_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == pages()[name], "run `make docs`"


def test_links_between_pages_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [*root.glob("*.md"), *DOCS.rglob("*.md"), *root.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page} links to {target}"
