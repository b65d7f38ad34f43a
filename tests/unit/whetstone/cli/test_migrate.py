"""`whetstone migrate`: a database that a proxy started by other means than `up` can begin on."""

import subprocess
import sys
from pathlib import Path

from sqlalchemy import Engine, select, text
from typer.testing import CliRunner

from migrations import schema
from whetstone.cli.main import app
from whetstone.database.engine import connect

SETTINGS = """
policy = "support"
policies = ["second"]
[vllm]
max_loras = 12
[projects.acme]
policies = ["acme-agent"]
"""


def migrated(folder: Path) -> Engine:
    (folder / "whetstone.toml").write_text(SETTINGS, encoding="utf-8")
    done = CliRunner().invoke(app, ["migrate", "--data", str(folder), "--config", str(folder / "whetstone.toml")])
    assert done.exit_code == 0, done.output
    return connect(f"sqlite:///{folder / 'whetstone.db'}")


def test_it_makes_the_projects_and_policies_of_the_settings_once(tmp_path: Path) -> None:
    for _ in range(2):
        engine = migrated(tmp_path)
        with engine.connect() as connection:
            p = schema.policies.c
            found = connection.execute(select(p.project, p.id, p.state).order_by(p.project, p.id)).all()
        engine.dispose()
        assert [tuple(row) for row in found] == [
            ("acme", "acme-agent", "recording"),
            ("default", "second", "recording"),
            ("default", "support", "recording"),
        ]


def test_what_a_policy_has_become_stays(tmp_path: Path) -> None:
    engine = migrated(tmp_path)
    with engine.begin() as connection:
        of_one = schema.policies.update().where(schema.policies.c.id == "support")
        connection.execute(of_one.values(state="training", live_version=0, next_step=7))
    engine.dispose()
    engine = migrated(tmp_path)
    with engine.connect() as connection:
        p = schema.policies.c
        row = connection.execute(select(p.state, p.next_step).where(p.id == "support")).one()
    engine.dispose()
    assert tuple(row) == ("training", 7)


def test_a_database_of_before_the_first_release_ends_with_one_sentence(tmp_path: Path) -> None:
    engine = migrated(tmp_path)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0005'"))
    engine.dispose()
    command = [sys.executable, "-P", "-m", "whetstone.cli.main", "migrate", "--data", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("whetstone: the database is at revision 0005") and "cannot be upgraded" in sentence
