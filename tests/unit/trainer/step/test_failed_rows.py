"""Rows that are kept: read back as they were, plain JSON, whole or not there, and not without bound."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.domain.rows import Row
from trainer.step.step import failed_rows

ROOT = Path(__file__).resolve().parents[4]
MakeRows = Callable[..., list[Row]]

WRITER = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from trainer.step import failed_rows
from trainer.domain.rows import Row

row = Row("t", (1,) * 2000, (True,) * 2000, (-1.0,) * 2000, (0,) * 2000, (1.0,) * 2000, (0.5,) * 2000)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
try:
    failed_rows.dump(Path(sys.argv[1]), "starter#7", [row])
except OSError as error:
    print(error)
"""


def same(one: Row, other: Row) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(one) == repr(other)


def test_rows_come_back_as_they_were(tmp_path: Path, make_rows: MakeRows) -> None:
    rows = make_rows(3)
    path = failed_rows.dump(tmp_path / "kept", "starter#7", rows)
    assert path == tmp_path / "kept" / "starter-7.jsonl"
    back = failed_rows.read(path)
    assert len(back) == 3 and all(map(same, rows, back))


def test_constrained_rows_come_back_as_they_were(tmp_path: Path, make_rows: MakeRows) -> None:
    (row,) = make_rows(1)
    constraints = Constraints(top_p=0.9, logit_bias=((3, 0.5),), allowed_token_ids=(1, 2))
    spans = (ConstrainedSpan("one", 5, 7, constraints), ConstrainedSpan("two", 8, 9, constraints, True, b"\x00\xff"))
    row = replace(row, constrained=spans)
    (back,) = failed_rows.read(failed_rows.dump(tmp_path, "starter#7", [row]))
    assert same(back, row) and back.constrained == spans


def test_a_file_with_one_advantage_for_the_row_is_read_too(tmp_path: Path, make_rows: MakeRows) -> None:
    (row,) = make_rows(1)
    path = failed_rows.dump(tmp_path, "starter#7", [row])
    values = json.loads(path.read_text())
    del values["advantages_T"]
    path.write_text(json.dumps(values | {"advantage": 0.25}) + "\n")
    (back,) = failed_rows.read(path)
    assert same(back, replace(row, advantages_T=(0.25,) * len(row.token_ids_T)))


def test_each_line_is_plain_json_and_what_json_does_not_have_is_null(tmp_path: Path, make_rows: MakeRows) -> None:
    (row,) = make_rows(1)
    path = failed_rows.dump(tmp_path, "starter#1", [replace(row, advantages_T=(math.inf,) * len(row.token_ids_T))])
    (line,) = path.read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    told = json.loads(line, parse_constant=refuse)
    assert set(told["advantages_T"]) == {None}
    nulls = [place for place, logprob in enumerate(told["inference_logprobs_T"]) if logprob is None]
    assert nulls == [place for place, sampled in enumerate(row.sampled_T) if not sampled] != []
    assert told["token_ids_T"] == list(row.token_ids_T)


def test_a_step_that_fails_again_leaves_one_file(tmp_path: Path, make_rows: MakeRows) -> None:
    failed_rows.dump(tmp_path, "starter#1", make_rows(4))
    path = failed_rows.dump(tmp_path, "starter#1", make_rows(2))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert len(failed_rows.read(path)) == 2


def test_a_disk_that_refuses_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kept")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "File too large" in done.stdout, done.stderr
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.parametrize("more", [0, 3])
def test_only_the_newest_are_kept(tmp_path: Path, make_rows: MakeRows, more: int) -> None:
    rows = make_rows(1)
    for number in range(failed_rows.MOST + more):
        path = failed_rows.dump(tmp_path, f"starter#{number}", rows)
        os.utime(path, (number, number))
    newest = failed_rows.dump(tmp_path, "starter#last", rows)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {newest.name, *(f"starter-{n}.jsonl" for n in range(more + 1, failed_rows.MOST + more))}
