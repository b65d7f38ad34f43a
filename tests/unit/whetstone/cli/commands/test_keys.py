"""`whetstone keys`: words, exit codes, and what a proxy that runs makes of it."""

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from migrations import schema
from whetstone.cli.main import app
from whetstone.config.settings import SettingsError
from whetstone.database.engine import connect
from whetstone.domain.api_keys import hash_of

KEY = re.compile(r"wsk_([a-z0-9]{12})_[A-Za-z0-9]{43}\n")


def keys(data: Path, *arguments: str, **environment: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "200"} | environment)
    return runner.invoke(app, ["keys", *arguments, "--data", str(data)])


def create(data: Path, *arguments: str, **environment: str) -> str:
    """The key's text."""
    result = keys(data, "create", "--name", "app", "--scope", "inference", *arguments, **environment)
    assert result.exit_code == 0, result.output
    assert KEY.fullmatch(result.stdout), result.stdout
    return result.stdout.strip()


def listed(data: Path, *arguments: str) -> list[dict[str, Any]]:
    result = keys(data, "list", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.fixture
def data(sqlite_template: Path, tmp_path: Path) -> Path:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    return tmp_path


def test_the_key_alone_is_on_stdout_and_the_rest_beside_it(data: Path) -> None:
    result = keys(data, "create", "--name", "app", "--scope", "inference", "--scope", "feedback", "--expires", "90d")
    found = KEY.fullmatch(result.stdout)
    assert result.exit_code == 0 and found
    told = " ".join(result.stderr.split())
    assert f"key {found[1]} of project default opens inference, feedback, until 2" in told
    assert "it is the first: from now on every request needs a key" in told
    assert result.stdout.strip() not in told
    (row,) = listed(data)
    assert (row["key_id"], row["name"], row["scopes"]) == (found[1], "app", ["inference", "feedback"])
    expires_in = datetime.fromisoformat(row["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89) < expires_in <= timedelta(days=90)


def test_the_second_key_is_not_the_first(data: Path) -> None:
    create(data)
    assert "it is the first" not in keys(data, "create", "--name", "b", "--scope", "admin").stderr


def test_a_key_is_made_before_any_stack_was_started(tmp_path: Path) -> None:
    create(tmp_path / "new")
    assert len(listed(tmp_path / "new")) == 1


def test_quotas_are_kept(data: Path) -> None:
    create(data, "--requests-per-minute", "60", "--tokens-per-minute", "100000")
    (row,) = listed(data)
    assert (row["requests_per_min"], row["tokens_per_min"]) == (60, 100_000)
    assert "60 requests, 100000 tokens" in keys(data, "list").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--name", "x", "--scope", "everything"), "no scope; there are: inference, feedback, admin"),
        (("--name", "x", "--scope", "admin", "--expires", "soon"), "write 12h, 90d or 2w"),
        (("--name", "", "--scope", "admin"), "1 to 100 characters"),
        (("--name", "a\nb", "--scope", "admin"), "1 to 100 characters"),
        (("--name", "x"), "--scope"),
        (("--scope", "admin"), "--name"),
        (("--name", "x", "--scope", "admin", "--requests-per-minute", "0"), "--requests-per-minute"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_made(data: Path, arguments: tuple[str, ...], says: str) -> None:
    result = keys(data, "create", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert says in re.sub(r"[\s│]+", " ", result.stderr)
    assert listed(data) == []


def test_an_unknown_project_is_told_which_there_are(data: Path) -> None:
    acme = {"WHETSTONE_PROJECTS": '{"acme": {"policies": ["acme-agent"]}}', "WHETSTONE_VLLM__MAX_LORAS": "8"}
    for arguments in (("create", "--name", "x", "--scope", "admin"), ("list",)):
        result = keys(data, *arguments, "--project", "nosuch", **acme)
        assert isinstance(result.exception, SettingsError)  # `main` tells it, and ends with 2
        assert "there is no project 'nosuch'; there are: default, acme" in str(result.exception)
    create(data, "--project", "acme", **acme)
    assert [row["project"] for row in listed(data)] == ["acme"]


def test_the_list_tells_what_became_of_each_and_no_secret(data: Path) -> None:
    standing, gone = create(data), create(data)
    used = KEY.fullmatch(create(data) + "\n")
    assert used
    engine = connect(f"sqlite:///{data / 'whetstone.db'}")
    with engine.begin() as connection:
        k = schema.api_keys
        past = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
        connection.execute(k.update().where(k.c.id == used[1]).values(last_used_at=past, expires_at=past))
    engine.dispose()
    assert keys(data, "revoke", gone.split("_")[1]).exit_code == 0
    result = keys(data, "list")
    assert result.exit_code == 0
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if "app" in line}
    assert "open" in lines[standing.split("_")[1]] and "revoked 2" in lines[gone.split("_")[1]]
    assert "2026-01-02 03:04" in lines[used[1]] and "over 2026-01-02" in lines[used[1]]
    for key in (standing, gone):
        assert key.rpartition("_")[2] not in result.stdout and hash_of(key.encode()) not in result.stdout


def test_a_key_is_revoked_by_its_id_or_by_its_text(data: Path) -> None:
    first, second = create(data), create(data)
    for named in (first.split("_")[1], second):
        result = keys(data, "revoke", named)
        assert result.exit_code == 0 and second not in result.output
    assert all(row["revoked_at"] for row in listed(data))


def test_an_unknown_key_is_not_revoked(data: Path) -> None:
    result = keys(data, "revoke", "nosuch")
    assert result.exit_code == 1 and "there is no key 'nosuch'; `whetstone keys list` shows them" in result.stderr


def test_without_a_database_there_is_nothing_to_list(tmp_path: Path) -> None:
    result = keys(tmp_path / "none", "list")
    assert isinstance(result.exception, SettingsError) and "no database" in str(result.exception)
