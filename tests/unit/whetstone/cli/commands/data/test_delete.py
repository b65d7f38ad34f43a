"""`whetstone delete`: shown before it is done, and who had learned from it is told."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from typer.testing import CliRunner, Result

from migrations import schema
from tests.conftest import Seed
from tests.unit.whetstone.config.test_privacy import Deleting
from whetstone.cli.main import app
from whetstone.config.privacy import pseudonym
from whetstone.database.engine import connect


class Here(Deleting):
    """A data folder without a stack."""

    def __init__(self, data: Path) -> None:
        self.data = data
        engine = connect(f"sqlite:///{data / 'whetstone.db'}")
        seed = Seed(engine)
        seed.project("default")
        super().__init__(engine, seed)

    def run(self, *arguments: str, said: str | None = None) -> Result:
        command = ["delete", *arguments, "--data", str(self.data)]
        return CliRunner(env={"COLUMNS": "160"}).invoke(app, command, input=said)


@pytest.fixture
def here(sqlite_template: Path, tmp_path: Path) -> Iterator[Here]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    here = Here(tmp_path)
    yield here
    here.engine.dispose()


def trained(here: Here) -> None:
    """Two trajectories of alice's, of which version 1 has learned."""
    here.seed.trajectory("t", turns=2, state="trained", end_user="alice")
    here.seed.trajectory("u", end_user="alice")
    here.step(1, "t")
    here.version(1, 0, 1)


def test_what_would_go_is_shown_and_nothing_is_written(here: Here) -> None:
    trained(here)
    result = here.run("--user", "alice", "--dry-run")
    assert result.exit_code == 0, result.output
    assert f"user {pseudonym('alice')}: would go 2 trajectories, 3 completions" in result.stdout
    assert "starter@v1" in result.stderr
    assert here.ids() == {"t", "u"}
    assert here.rows(schema.erasures) == []


@pytest.mark.parametrize(("said", "left"), [("n\n", {"t", "u"}), ("y\n", {"u"})])
def test_it_asks_before_it_deletes(here: Here, said: str, left: set[str]) -> None:
    trained(here)
    result = here.run("--trajectory", "t", said=said)
    assert "Delete it for good?" in result.output
    assert here.ids() == left


def test_json_tells_what_went(here: Here) -> None:
    trained(here)
    result = here.run("--trajectory", "t", "--trajectory", "nobody", "--yes", "--json")
    first, second = json.loads(result.stdout)
    assert (first["target"], first["trajectories"], first["versions"]) == ("t", 1, {"starter": [1]})
    assert (second["target"], second["trajectories"], second["versions"]) == ("nobody", 0, {})
    assert here.ids() == {"u"}


def test_what_a_step_has_waits_and_is_told(here: Here) -> None:
    here.seed.trajectory("t", state="claimed")
    result = here.run("--trajectory", "t", "--yes")
    assert result.exit_code == 0, result.output
    assert "1 trajectories wait for the step that has them" in result.stderr
    assert here.ids() == {"t"}


def test_what_is_old_goes(here: Here) -> None:
    trained(here)  # in January 2026
    assert here.run("--older-than", "1w", "--yes").exit_code == 0
    assert here.ids() == set()


def test_another_projects_are_deleted_where_it_is_named(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHETSTONE_PROJECTS", json.dumps({"acme": {"policies": ["second"]}}))
    monkeypatch.setenv("WHETSTONE_VLLM__MAX_LORAS", "20")
    here.seed.project("acme")
    for project in ("default", "acme"):
        here.seed.trajectory("t", project=project)
    assert here.run("--trajectory", "t", "--project", "acme", "--yes").exit_code == 0
    with here.engine.connect() as connection:
        assert list(connection.scalars(select(schema.trajectories.c.project))) == ["default"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("--user", "a", "--trajectory", "t"), ("--older-than", "soon"), ("--user", "alice", "--json")],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_refused(here: Here, arguments: tuple[str, ...]) -> None:
    result = here.run(*arguments)
    assert result.exit_code == 2, result.output


def test_a_project_that_is_none_is_refused(here: Here) -> None:
    result: Any = here.run("--user", "alice", "--project", "nobody", "--yes")
    assert "there is no project 'nobody'" in str(result.exception)
