"""A call as one line: what fits a terminal, what a pipe gets, whatever apps send."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from whetstone.calls.words import LINE, one_line
from whetstone.cli.tables.call_lines import HEAD, head, line

AT = datetime(2026, 1, 1, 12, 30, 5, tzinfo=UTC)
QUESTION = "Which cell is free? " * 20


def call(**changed: Any) -> dict[str, Any]:
    row = {"created_at": AT, "policy": "starter", "policy_version": 7, "status": "complete", "prompt_tokens": 412}
    return row | {"completion_tokens": 38, "ttft_ms": 120.4, "total_ms": 1500.0, "prompt": one_line(QUESTION)} | changed


def test_a_line_has_every_column_and_fits_80_columns() -> None:
    shown = line(call(), 80)
    assert shown.split()[:6] == ["12:30:05", "starter@v7", "complete", "412→38", "0.12", "1.50"]
    assert cell_len(shown) <= 80 and "Which cell is" in shown and shown.endswith("…")
    assert head(80).split() == " ".join(HEAD).split()


def test_a_pipe_gets_whole_names_and_the_first_words() -> None:
    policy = "a-policy-with-a-long-name"
    shown = line(call(policy=policy), None)
    assert f"{policy}@v7" in shown and shown.endswith(QUESTION[:LINE].strip())


def test_nothing_measured_is_a_dash() -> None:
    row = call(status="error", ttft_ms=None, total_ms=None, completion_tokens=None)
    assert line(row, None).split()[3:6] == ["412→–", "–", "–"]


@given(st.text(max_size=80), st.integers(10, 200))
def test_no_text_of_an_app_makes_a_line_wider_than_the_terminal(text: str, width: int) -> None:
    shown = line(call(prompt=one_line(text)), width)
    assert "\n" not in shown
    assert cell_len(shown) <= max(width, cell_len(line(call(prompt=""), None)))
