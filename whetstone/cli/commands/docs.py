"""`whetstone docs`: list the pages of the documentation, and show one in the terminal."""

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table

import whetstone
from whetstone.cli.options import console, print_json
from whetstone.errors import WhetstoneError
from whetstone.terminal.fitting import Fitting

FOLDER = Path(whetstone.__file__).resolve().parent.parent / "docs"
"""Of the checkout that is installed: a wheel has no pages."""
INDEX = "llms.txt"
_ENTRY = re.compile(r"- \[(?P<title>[^]]+)\]\((?P<file>[a-z_]+)\.md\): (?P<about>.+)")


class PageMissing(WhetstoneError):
    """There is no such page; the message names similar pages, or where the pages are."""


def page_names(incomplete: str) -> list[str]:
    """Return the pages that begin so, for shell completion."""
    return sorted(path.stem for path in FOLDER.glob(f"{incomplete}*.md"))


def docs(
    page: Annotated[
        str | None,
        typer.Argument(help="Its name: feedback, or docs/feedback.md as messages have it", autocompletion=page_names),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print the page as Markdown, as it is written")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON, one array")] = False,
) -> None:
    """Show a page of the documentation; without a name, list the pages.

    Messages name pages as `docs/feedback.md`, which is understood too. In a pipe a page is printed as it is written, in
    Markdown.

    Examples:

        whetstone docs
        whetstone docs feedback | less
    """
    if page is None:
        entries = _entries()
        if as_json:
            print_json(entries)
        else:
            console.print(Fitting(_table(entries)), crop=False)
        return
    text = _path_of(page).read_text(encoding="utf-8")
    if plain or not console.is_terminal:
        typer.echo(text)
    else:
        console.print(Markdown(text))


def _check_pages() -> None:
    """Check that the pages are there.

    Raises:
        PageMissing: they are not.
    """
    if not (FOLDER / INDEX).is_file():
        raise PageMissing(f"there are no pages in {FOLDER}: they are in the folder docs of Whetstone's repository")


def _entries() -> list[dict[str, str]]:
    """Return the pages of the index, in its order."""
    _check_pages()
    lines = (FOLDER / INDEX).read_text(encoding="utf-8").splitlines()
    matches = filter(None, map(_ENTRY.fullmatch, lines))
    return [{"page": entry["file"], "about": entry["about"]} for entry in matches]


def _table(entries: list[dict[str, str]]) -> Table:
    table = Table("page", "about", caption="`whetstone docs feedback` shows one", caption_justify="left")
    for entry in entries:
        table.add_row(entry["page"], entry["about"])
    return table


def _path_of(page: str) -> Path:
    """Return the file of a page by its name, with or without folder and ending.

    Raises:
        PageMissing: there is none.
    """
    _check_pages()
    name = page.removeprefix("docs/").removesuffix(".md")
    names = {path.stem: path for path in FOLDER.glob("*.md")}
    if name not in names:
        alike = difflib.get_close_matches(name, names, n=3)
        meant = f"did you mean {', '.join(alike)}? " if alike else ""
        raise PageMissing(f"there is no page {name[:100]!r}; {meant}`whetstone docs` lists all")
    return names[name]
