"""The next version of Whetstone: a copy of `migrations` with one more revision, which runs as a program of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from alembic.script import ScriptDirectory

ROOT = Path(__file__).resolve().parents[3]
REVISION = "next"
ADDED_VIEW = "admin_later"
CODE = """
import sys
from migrations.run import MigrationError, check, upgrade
from whetstone.database.engine import snapshot

try:
    if sys.argv[1] == "upgrade":
        upgrade(sys.argv[2])
    else:
        with snapshot(sys.argv[2]) as connection:
            check(connection)
except MigrationError as error:
    sys.exit(str(error))
"""
ADDED_REVISION = f"""
import sqlalchemy as sa
from alembic import op

from migrations.initial_views import SHARED

revision, down_revision = "{REVISION}", "{{head}}"


def upgrade():
    op.add_column("groups", sa.Column("later", sa.Text))
    op.create_index("ix_groups_later", "groups", ["project", "later"])
    op.create_table("later", sa.Column("project", sa.Text, primary_key=True))
    op.execute(sa.text("DROP VIEW admin_groups"))
    query = SHARED["admin_groups"].replace("closed_at", "closed_at, later")
    op.execute(sa.text(f"CREATE VIEW admin_groups AS {{{{query}}}}"))
    op.execute(sa.text("CREATE VIEW {ADDED_VIEW} AS SELECT project FROM later"))
"""
"""It adds a column, an index, a table and a view, and makes a view again: all that a revision may do."""


class NextVersion:
    """The copy in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        copy = folder / "migrations"
        shutil.copytree(ROOT / "migrations", copy, ignore=shutil.ignore_patterns("__pycache__"))
        head = ScriptDirectory(str(copy)).get_current_head()
        (copy / "versions" / "next.py").write_text(ADDED_REVISION.format(head=head), encoding="utf-8")

    def upgrade(self, url: str) -> subprocess.CompletedProcess[str]:
        """Upgrade the database to it; what it refuses is in stderr."""
        return self._run("upgrade", url)

    def check(self, url: str) -> subprocess.CompletedProcess[str]:
        """Look whether the database is of this version; if not, the reason is in stderr."""
        return self._run("check", url)

    def _run(self, command: str, url: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": f"{self._folder}{os.pathsep}{ROOT}"}
        run = [sys.executable, "-c", CODE, command, url]
        return subprocess.run(run, cwd=self._folder, env=environment, capture_output=True, text=True)
