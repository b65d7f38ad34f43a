"""`whetstone sql` and `whetstone sql-role`: words, forms, exit codes, and memory."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from migrations.views import VIEWS
from tests.conftest import Seed
from whetstone.cli.main import app, main
from whetstone.cli.tables.sql_query import QueryFailed
from whetstone.database.engine import connect

COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {most}) SELECT i, {more} AS t FROM n"
MOST_KIB = 400 * 1024
"""Of the whole process; the rows of the largest answer would take more."""


@pytest.fixture
def data(sqlite_template: Path, tmp_path: Path) -> Path:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    engine = connect(f"sqlite:///{tmp_path / 'whetstone.db'}")
    seed = Seed(engine)
    seed.project("default")
    seed.trajectory("t", metadata={"customer": "acme"}, no_train=True)
    engine.dispose()
    return tmp_path


def sql(data: Path, *arguments: str, stdin: str = "", **environment: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "200"} | environment)
    return runner.invoke(app, ["sql", *arguments, "--data", str(data)], input=stdin)


def test_a_table_is_on_stdout_and_the_count_beside_it(data: Path) -> None:
    result = sql(data, "SELECT trajectory_id, reward FROM admin_trajectories")
    assert result.exit_code == 0
    assert "│ t             │   NULL │" in result.stdout
    assert result.stderr == "1 row\n"


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("--csv", 'trajectory_id,reward,metadata,no_train\r\nt,,"{""customer"":""acme""}",true\r\n'),
        ("--json", '[\n{"trajectory_id":"t","reward":null,"metadata":{"customer":"acme"},"no_train":true}\n]\n'),
        ("--jsonl", '{"trajectory_id":"t","reward":null,"metadata":{"customer":"acme"},"no_train":true}\n'),
    ],
)
def test_machines_get_the_rows_and_nothing_else(data: Path, form: str, told: str) -> None:
    result = sql(data, "SELECT trajectory_id, reward, metadata, no_train FROM admin_trajectories", form)
    assert (result.exit_code, result.stdout_bytes.decode(), result.stderr) == (0, told, "")


def test_without_a_query_the_views_are_told(data: Path) -> None:
    told = " ".join(sql(data).stdout.split())
    assert [view.name for view in VIEWS if f"{view.name} " not in told] == []
    assert [view.name for view in VIEWS if view.purpose not in told] == []
    (one,) = [view for view in json.loads(sql(data, "--json").stdout) if view["view"] == "admin_steps"]
    assert {"name": "kl", "sqlite": "real", "postgresql": "double precision"}.items() <= one["columns"][15].items()


def test_the_name_of_a_view_alone_tells_its_columns(data: Path) -> None:
    told = sql(data, "admin_step_trajectories").stdout
    assert "staleness" in told and "updates from the oldest version that answered in it to version_in" in told


def test_a_query_comes_from_a_file_or_from_stdin(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "query.sql"
    file.write_text("SELECT 7 AS seven\n")
    assert sql(data, "--file", str(file), "--jsonl").stdout == '{"seven":7}\n'
    assert sql(data, "-", "--jsonl", stdin="SELECT 8 AS eight").stdout == '{"eight":8}\n'
    command = [sys.executable, "-P", "-m", "whetstone.cli.main", "sql", "--jsonl", "--data", str(data)]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=120, input="SELECT 9 AS nine")
    assert piped.stdout == '{"nine":9}\n'


def test_a_limit_says_that_there_is_more(data: Path) -> None:
    result = sql(data, COUNT.format(most=5, more=1), "--limit", "2")
    assert "the first 2 rows" in result.stderr and result.exit_code == 0
    assert len(sql(data, COUNT.format(most=5, more=1), "--limit", "2", "--jsonl").stdout.splitlines()) == 2
    assert sql(data, COUNT.format(most=5, more=1), "--limit", "5").stderr == "5 rows\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("SELECT rewrd FROM admin_trajectories",), "Did you mean reward?"),
        (("DELETE FROM policies",), "only reads"),
        (("SELECT 1; SELECT 2",), "one query at a time"),
        (("SELECT 1", "--csv", "--json"), "choose one of --csv, --json and --jsonl"),
        (("SELECT 1", "--file", "query.sql"), "give a query or --file, not both"),
        (("--file", "nowhere.sql"), "No such file"),
        (("SELECT 1", "--limit", "0"), "--limit"),
        ((COUNT.format(most=10**12, more=1), "--csv", "--timeout", "0.2"), "longer than 0.2 s"),
    ],
)
def test_what_cannot_be_asked_ends_with_2_and_says_why(
    data: Path,
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["whetstone", "sql", *arguments, "--data", str(data)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and says in told


def test_a_timeout_is_a_setting_too(data: Path) -> None:
    with pytest.raises(QueryFailed, match="longer than 0.1 s") as caught:
        result = sql(data, COUNT.format(most=10**12, more=1), "--csv", WHETSTONE_SQL__TIMEOUT_S="0.1")
        raise result.exception or AssertionError(result.output)
    assert "sql.timeout_s" in str(caught.value)


@pytest.mark.parametrize("asked", [(COUNT.format(most=10**12, more=1), "--csv"), ()], ids=["rows", "views"])
def test_who_has_read_enough_may_hang_up(data: Path, asked: tuple[str, ...]) -> None:
    line = f"{sys.executable} -P -m whetstone.cli.main sql {shlex.join(asked)} --data {data} </dev/null | head -2"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 2)


@pytest.mark.slow
@pytest.mark.long(part="postgresql")
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.stack)])
def test_a_million_rows_pass_through_bounded_memory(data: Path, kind: str, request: pytest.FixtureRequest) -> None:
    environment = dict(os.environ)
    if kind == "postgresql":
        environment["WHETSTONE_DATABASE"] = request.getfixturevalue("postgres_databases").empty()
    most, words = 1_000_000, "'" + "x" * 500 + "'"
    counted = (
        "import re, sys; from whetstone.cli.main import main\n"
        "try: main()\n"
        # Not `ru_maxrss`: a child's begins with what its parent had.
        "finally: print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    query = COUNT.format(most=most, more=words)
    command = [sys.executable, "-P", "-c", counted, "sql", query, "--csv", "--data", str(data), "--timeout", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as asked:
        assert asked.stdout is not None and asked.stderr is not None
        lines, last = 0, b""
        for line in asked.stdout:
            lines += 1
            last = line
        used_kib = int(asked.stderr.read().split()[-1])
    assert (asked.returncode, lines) == (0, most + 1)
    assert last.startswith(b"1000000,xxx")
    assert used_kib < MOST_KIB
