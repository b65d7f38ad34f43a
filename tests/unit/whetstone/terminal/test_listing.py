"""Lists of objects: a row for each at 80 columns, whole in a pipe and with --wide."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from whetstone.terminal.listing import Listing, shorten

ID = "019b2c3d-4e5f-7a8b-9c0d-1e2f3a4b5c6d"
LONG = "feedback came after its group was claimed"


def listed(width: int, *, terminal: bool = True, wide: bool = False, reason: str = "no_reward") -> str:
    table = Table(*map(Column, ("id", "task", "state", "reason", "began")), box=None, pad_edge=False)
    table.add_row(ID, "a task of the app", "rewarded", reason, "12 min")
    table.add_row("short", "", Text("open"), "", "1 d")
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(Listing(table, ids=("id",), optional=("task",), wide=wide), crop=False)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_what_fits_is_whole() -> None:
    first, row, other = listed(100).splitlines()
    assert first.split() == ["id", "task", "state", "reason", "began"]
    assert row.split() == [ID, *["a", "task", "of", "the", "app", "rewarded", "no_reward", "12", "min"]]
    assert other.split() == ["short", "open", "1", "d"]


def test_an_id_is_shortened_in_its_middle_as_little_as_it_takes() -> None:
    text = listed(80)
    (shown,) = (word for word in text.split() if "…" in word)
    head, tail = shown.split("…")
    assert ID.startswith(head) and ID.endswith(tail) and len(text.splitlines()) == 3
    assert max(map(len, text.splitlines())) == 80 and "a task of the app" in text


def test_what_matters_least_is_left_out_and_named() -> None:
    lines = listed(48).splitlines()
    assert max(map(len, lines)) <= 48 and len(lines) == 4
    assert "task" not in lines[0] and "no_reward" in lines[1]
    assert lines[-1] == "not shown: task; --wide shows all"


def test_words_are_wrapped_and_not_cut_where_columns_do_not_fit() -> None:
    text = listed(60, reason=LONG)
    assert max(map(len, text.splitlines())) <= 60
    assert all(word in text.split() for word in LONG.split())


def test_the_narrowest_terminal_gets_blocks_in_which_nothing_is_missing() -> None:
    text = listed(25)
    assert max(map(len, text.splitlines())) <= 25 and "…" not in text and "not shown" not in text
    assert "a task of" in text


@pytest.mark.parametrize(("terminal", "wide"), [(False, False), (True, True)])
def test_a_pipe_and_wide_cut_nothing(terminal: bool, wide: bool) -> None:
    text = listed(30, terminal=terminal, wide=wide, reason=LONG)
    assert len(text.splitlines()) == 3 and ID in text and LONG in text and "…" not in text


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "M", "Cf"]), max_size=40), st.integers(5, 45))
def test_a_shortened_text_has_the_width_at_most(text: str, width: int) -> None:
    short = shorten(text, width)
    assert cell_len(short) <= width
    assert short == text or "…" in short
