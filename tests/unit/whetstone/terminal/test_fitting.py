"""Tables at 80 columns, and at widths where nothing fits: no word of a header or state is cut."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from whetstone.terminal.fitting import Fitting

ROOT = Path(__file__).resolve().parents[4]
HEADERS = ("project", "policy", "other names", "base model", "answered by", "live version", "in test", "state")
PATH = "/srv/models/" + "deep/" * 12 + "model"


def shown(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(Fitting(table))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def wide() -> Table:
    table = Table(*HEADERS, title="policies")
    table.add_row("default", "starter", "gpt-4o, gpt-4o-mini", PATH, "vLLM", "12", "v13", "recording")
    return table


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_header_and_no_state_is_cut_however_narrow_the_screen(width: int) -> None:
    text = shown(wide(), width)
    words = re.findall(r"[\w.-]+", text)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for word in [*" ".join(HEADERS).split(), "recording", "starter", "default", "vLLM"]:
        assert word in words, (word, text)
    assert text.count("/") == PATH.count("/")


def test_a_long_word_goes_on_in_the_next_line() -> None:
    table = Table("id", "state")
    table.add_row("x" * 100, "open")
    text = shown(table, 40)
    assert text.count("x") == 100 and "…" not in text


def test_what_fits_is_a_table_as_it_was() -> None:
    table = Table("id", "state")
    table.add_row("a", "open")
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert shown(table, 80) == console.file.getvalue()  # type: ignore[attr-defined]


def test_what_does_not_fit_is_a_block_for_each_row() -> None:
    text = shown(wide(), 40)
    assert re.search(r"│ other names\s+│ gpt-4o, gpt-4o-mini", text)
    assert re.search(r"│ state\s+│ recording", text)


def test_every_table_of_the_command_line_is_a_fitting_one() -> None:
    """What makes a table passes it through Fitting or Listing, or cuts nothing by itself."""
    by_itself = {
        "whetstone/cli/tables/table_formats.py",  # a block for each row where columns do not fit
        "whetstone/terminal/fitting.py",
        "whetstone/terminal/listing.py",
        "whetstone/demo/demo.py",  # its figures are short
    }
    makers = [path for folder in ("whetstone", "judge", "trainer") for path in (ROOT / folder).rglob("*.py")]
    makers = [path for path in makers if re.search(r"rich\.table|rich import table", path.read_text("utf-8"))]
    assert len(makers) > 10
    for path in makers:
        name = str(path.relative_to(ROOT))
        assert name in by_itself or re.search(r"(Fitting|Listing)\(", path.read_text("utf-8")), name
