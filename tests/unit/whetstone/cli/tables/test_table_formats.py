"""Rows as a table, as CSV, as JSON."""

import csv
import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from whetstone.cli.tables.table_formats import CELL, csv_lines, json_array, json_lines, table

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def shown(columns: list[str], rows: list[list[Any]], width: int | None = None) -> str:
    console = Console(width=width or 1000, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table(columns, rows, width))
    return captured.get()


def test_nothing_and_the_empty_text_differ_in_every_form() -> None:
    rows = [[None, "", "NULL"]]
    assert "".join(csv_lines(["a", "b", "c"], rows)) == 'a,b,c\r\n,"",NULL\r\n'
    assert json.loads("".join(json_array(["a", "b", "c"], rows))) == [{"a": None, "b": "", "c": "NULL"}]
    assert [cell.strip() for cell in shown(["a", "b", "c"], rows).splitlines()[3].split("│")[1:-1]] == [
        "NULL", "''", "'NULL'",
    ]  # fmt: skip


@given(st.lists(st.tuples(TEXT, TEXT), max_size=5))
def test_what_csv_says_is_read_back_by_any_reader(rows: list[tuple[str, str]]) -> None:
    told = "".join(csv_lines(["a", 'b "quoted", so'], rows))
    assert list(csv.reader(io.StringIO(told, newline=""))) == [["a", 'b "quoted", so'], *map(list, rows)]


@given(st.lists(st.tuples(TEXT, st.integers(), st.none()), max_size=5))
def test_an_array_and_lines_say_the_same(rows: list[tuple[Any, ...]]) -> None:
    columns = ["a", "b", "c"]
    array = json.loads("".join(json_array(columns, rows)))
    assert array == [json.loads(line) for line in json_lines(columns, rows)]
    assert array == [dict(zip(columns, row, strict=True)) for row in rows]


def test_both_databases_read_alike() -> None:
    columns = ["created_at", "metadata", "token_ids", "served", "n", "x"]
    sqlite = ["2026-01-01 12:00:00.000000", '{"a":[1]}', "[1,2]", 1, 3, 0.5]
    at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    postgresql = [at, {"a": [1]}, [1, 2], True, Decimal("3"), Decimal("0.50")]
    for told in (csv_lines, json_lines):
        assert list(told(columns, [sqlite])) == list(told(columns, [postgresql]))
    assert json.loads(next(json_lines(columns, [sqlite]))) == {
        "created_at": "2026-01-01 12:00:00.000000", "metadata": {"a": [1]}, "token_ids": [1, 2], "served": True,
        "n": 3, "x": 0.5,
    }  # fmt: skip


def test_a_text_that_looks_like_an_object_stays_a_text() -> None:
    (line,) = json_lines(["response_text", "metadata"], [['{"a": 1}', "{broken"]])
    assert json.loads(line) == {"response_text": '{"a": 1}', "metadata": "{broken"}


def test_names_that_come_twice_are_told_apart() -> None:
    (line,) = json_lines(["count", "count", "count_2", "count"], [[1, 2, 3, 4]])
    assert json.loads(line) == {"count": 1, "count_3": 2, "count_2": 3, "count_4": 4}


def test_what_json_has_no_word_for_is_a_text() -> None:
    row = [float("nan"), b"\x00\xff", date(2026, 1, 2), Decimal("NaN")]
    (line,) = json_lines(["a", "b", "c", "d"], [row])
    assert json.loads(line) == {"a": "nan", "b": "\\x00ff", "c": "2026-01-02", "d": "nan"}


def test_a_table_cuts_what_is_long_and_csv_does_not() -> None:
    long = "ü" * (CELL + 1)
    assert f"{'ü' * (CELL - 1)}…" in shown(["a"], [[long]])
    assert list(csv_lines(["a"], [[long]]))[1] == f"{long}\r\n"


def test_a_table_cannot_move_the_cursor_of_who_reads_it() -> None:
    told = shown(["a"], [["\x1b[2Jgone\r\nnext\x07 [bold]"]])
    assert "·[2Jgone·↵next· [bold]" in told and "\x1b" not in told


def test_what_is_too_wide_has_a_line_for_each_column() -> None:
    columns, row = ["first", "second", "third"], ["a" * 30, "b" * 30, 3]
    assert len(shown(columns, [row], width=120).splitlines()) == 5
    told = shown(columns, [row, row], width=60)
    assert all(len(line) <= 60 for line in told.splitlines())
    assert [line.split()[1] for line in told.splitlines() if "│" in line] == columns * 2


def test_numbers_stand_on_the_right() -> None:
    lines = shown(["name", "n"], [["a", 1], ["b", 1000]]).splitlines()
    assert lines[3] == "│ a    │    1 │"
