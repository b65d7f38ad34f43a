"""`whetstone versions`: by the proxy where one runs, else in the database; files copied."""

import hashlib
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.exc import IntegrityError
from typer.testing import CliRunner, Result

from migrations import schema
from tests.conftest import Seed
from tests.unit.proxy.api.admin.test_versions import Versions
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for
from tests.unit.whetstone.conftest import Ended
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.main import app
from whetstone.config.settings import STARTER, Settings, SettingsError
from whetstone.database.engine import connect
from whetstone.registry import adapters, version_store
from whetstone.registry.projects import Store
from whetstone.stack.data_lock import LOCK, exclusive, is_locked, mark_stopping, phase


def invoke(data: Path, *arguments: str, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"} | environment).invoke(app, [*arguments, "--data", str(data)])


class Here:
    """A data folder without a stack: version 2 is live, 1 before it, 3 was rejected."""

    def __init__(self, data: Path, engine: Engine) -> None:
        self.data, self.engine = data, engine
        self.versions = Versions(engine, data / "adapters")
        for state in ("retired", "retired", "rejected"):
            self.versions.add(state, served=state != "rejected", reason="worse" if state == "rejected" else None)
        self.versions.live(2)

    def run(self, *arguments: str, **environment: str) -> Result:
        return invoke(self.data, *arguments, **environment)

    def refused(self, *arguments: str, code: int = 1) -> str:
        result = self.run(*arguments)
        assert result.exit_code == code, result.output
        return " ".join(result.stderr.split())

    def row(self, name: str) -> Any:
        return self.versions.seed.one(schema.policy_versions, name)

    def decisions(self) -> list[str]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(schema.gate_results.c.decision)).scalars())

    def live(self, policy: str = "starter") -> int:
        return int(self.versions.seed.one(schema.policies, policy).live_version)


@pytest.fixture
def here(sqlite_template: Path, tmp_path: Path) -> Iterator[Here]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    engine = connect(f"sqlite:///{tmp_path / 'whetstone.db'}")
    Store(engine).prepare(Settings(data=tmp_path, policies=("second",), vllm={"max_loras": 8}))  # type: ignore[arg-type]
    yield Here(tmp_path, engine)
    engine.dispose()


class Silent:
    """A server that reads what it is asked, says `answer`, and closes."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.asked = answer, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Silent":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.create_connection(self._socket.getsockname()) as end:
            end.sendall(b"END")
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                received = connection.recv(2**16)
                if received == b"END":
                    return
                while not received.rstrip().endswith(b"}"):
                    received += connection.recv(2**16)
                self.asked += 1
                connection.sendall(self.answer)


class Stack(Here):
    """The same with a proxy that runs, as `up` leaves its addresses."""

    def __init__(self, data: Path, engine: Engine, proxy: RunningProxy) -> None:
        super().__init__(data, engine)
        self.proxy = proxy
        write_addresses(data, proxy=proxy.url, database=proxy.settings.database_url)

    def speaks(self) -> str | None:
        return self.proxy.chat().headers.get("x-policy-version")


@pytest.fixture
def stack(sqlite_template: Path, tmp_path: Path) -> Iterator[Stack]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    with FakeVllm() as fake:
        proxy = RunningProxy(settings_for(f"sqlite:///{tmp_path / 'whetstone.db'}", fake.url, tmp_path))
        stack = Stack(tmp_path, proxy.engine, proxy)
        wait_for(lambda: stack.speaks() == "2")
        yield stack
        proxy.stop()


def test_with_a_stack_the_next_request_goes_by_the_move(stack: Stack) -> None:
    result = stack.run("versions", "rollback", "--reason", "it [swears]")
    assert stack.speaks() == "1"
    assert result.exit_code == 0, result.output
    assert "version 1 of starter answers now, 2 no longer" in result.stdout and "rejected: 2" in result.stdout
    assert stack.row("starter@v2").reason == "rolled back to version 1: it [swears]"
    assert stack.run("versions", "promote", "starter", "3").exit_code == 0  # rejected, and not loaded
    assert stack.speaks() == "3"
    assert "version 3 of starter answers already" in stack.run("versions", "promote", "starter", "3").stdout
    assert stack.run("versions", "pin", "starter", "1").exit_code == 0
    assert stack.row("starter@v1").pinned_at is not None
    assert stack.run("versions", "rollback", "--to", "0").exit_code == 0
    assert stack.speaks() == "0"


def test_what_the_proxy_refuses_is_said_in_its_words(stack: Stack) -> None:
    assert "starter has no version 9; `whetstone versions starter` lists them" in stack.refused(
        "versions", "promote", "starter", "9"
    )
    assert "does not descend from version 3" in stack.refused("versions", "rollback", "--to", "3")
    assert "there is no policy 'no body'; there are: starter" in stack.refused("versions", "rollback", "no body")


def test_a_stack_that_is_gone_is_none(here: Here) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url, database = f"http://127.0.0.1:{free.getsockname()[1]}", f"sqlite:///{here.data / 'whetstone.db'}"
        write_addresses(here.data, proxy=url, database=database)
        assert here.run("versions", "promote", "starter", "1").exit_code == 0
    assert here.live() == 1


def left(here: Here, proxy: str) -> None:
    """Write the addresses of a stack, as `up` leaves them."""
    write_addresses(here.data, proxy=proxy, database=f"sqlite:///{here.data / 'whetstone.db'}")


@pytest.fixture
def refusing() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


MOVES = (
    (
        "versions",
        "rollback",
    ),
    ("versions", "promote", "starter", "1"),
    ("versions", "pin", "starter", "1"),
)


@pytest.mark.parametrize("arguments", MOVES)
def test_a_stack_that_runs_without_its_proxy_is_waited_for_and_nothing_is_moved(
    whetstone: Callable[..., Ended], here: Here, refusing: str, arguments: tuple[str, ...]
) -> None:
    left(here, refusing)
    with exclusive(here.data):
        ended = whetstone(*arguments, "--data", str(here.data))
    assert (
        ended.code == 2
        and "its proxy takes no connection" in ended.message
        and "ask again in a moment" in ended.message
    )
    assert here.live() == 2 and here.decisions() == []
    assert here.run(*arguments).exit_code == 0  # the lock is gone, and so is the stack
    assert len(here.decisions()) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", b"no HTTP\r\n\r\n"])
def test_a_proxy_that_falls_silent_once_asked_may_have_done_it(here: Here, answer: bytes) -> None:
    with Silent(answer) as silent:
        left(here, silent.url)
        for asked, arguments in enumerate(MOVES, 1):
            said = here.refused(*arguments)
            assert "whether it was done is unknown: `whetstone versions starter` shows it" in said
            assert silent.asked == asked
    assert here.live() == 2 and here.decisions() == []


def test_an_address_that_is_none_is_no_missing_stack(whetstone: Callable[..., Ended], here: Here) -> None:
    for url in ("http://h:port", "nothing"):
        left(here, url)
        ended = whetstone("versions", "rollback", "--data", str(here.data))
        assert ended.code == 2 and "up.json cannot be read" in ended.message
    assert here.live() == 2


def test_looking_whether_a_data_folder_is_in_use_leaves_it_free(tmp_path: Path) -> None:
    assert not is_locked(tmp_path) and not (tmp_path / LOCK).exists()
    with exclusive(tmp_path):
        assert is_locked(tmp_path) and is_locked(tmp_path)
        with pytest.raises(SettingsError, match=f"process {os.getpid()}"), exclusive(tmp_path):
            pass
        assert phase(tmp_path) == "starting"
        mark_stopping(tmp_path)
        assert phase(tmp_path) == "stopping"
        with pytest.raises(SettingsError, match=rf"process {os.getpid()}\)"), exclusive(tmp_path):
            pass
    assert not is_locked(tmp_path) and phase(tmp_path) is None
    with exclusive(tmp_path):
        assert phase(tmp_path) == "starting"


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "options", "live"), [(b"n\n", (), 2), (b"y\n", (), 1), (b"", ("--yes",), 1)])
def test_on_a_terminal_a_rollback_is_confirmed_first(
    here: Here, answer: bytes, options: tuple[str, ...], live: int
) -> None:
    person, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "whetstone.cli.main",
        "versions",
        "rollback",
        "starter",
        *options,
        "--data",
        str(here.data),
    ]
    os.write(person, answer)
    ended = subprocess.run(command, stdin=terminal, capture_output=True, text=True, timeout=60)
    os.close(person)
    os.close(terminal)
    assert ("Make version 1 of starter live again" in ended.stderr) == (not options)
    assert (ended.returncode, here.live()) == (0 if live == 1 else 1, live), ended.stdout + ended.stderr


def test_without_a_stack_moves_are_made_in_the_database(here: Here) -> None:
    result = here.run("versions", "rollback", "starter", "--reason", "it swears")
    assert result.exit_code == 0, result.output
    assert "version 1 of starter answers now, 2 no longer" in result.stdout
    assert (here.live(), here.row("starter@v2").state) == (1, "rejected")
    promoted = here.run("versions", "promote", "starter", "2")
    assert promoted.exit_code == 0 and "`whetstone versions rollback starter` goes back to version 1" in promoted.stdout
    assert (here.live(), here.row("starter@v2").state, here.row("starter@v1").state) == (2, "live", "retired")
    assert "starter@v1 is pinned" in here.run("versions", "pin", "starter", "1").stdout
    assert here.row("starter@v1").pinned_at is not None
    assert "starter@v1 is no longer pinned" in here.run("versions", "pin", "starter", "1", "--off").stdout
    assert here.row("starter@v1").pinned_at is None
    query = "SELECT decision, version, against, reason FROM admin_gate_results ORDER BY created_at"
    assert [list(row.values()) for row in json.loads(here.run("sql", query, "--json").stdout)] == [
        ["rollback", 2, 1, "it swears"],
        ["promote", 2, 1, None],
        ["pin", 1, None, None],
        ["unpin", 1, None, None],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("versions", "promote", "starter", "9"), "starter has no version 9"),
        (("versions", "rollback", "--to", "3"), "does not descend from version 3"),
        (("versions", "rollback", "second"), "version 0 of second has nothing before it"),
        (("versions", "pin", "starter", "3"), "version 3 of starter is rejected; promote it"),
        (("versions", "export", "starter@v9", "out"), "starter has no version 9"),
        (("versions", "export", "starter@v0", "out"), "version 0 of starter is the base model: it has no adapter"),
        (("versions", "fork", "starter@v0", "starter"), "version 0 of starter is the base model"),
        (("versions", "import", "nowhere", "starter"), "nowhere has no adapter_config.json"),
    ],
)
def test_what_cannot_be_done_ends_with_1_and_changes_nothing(
    here: Here, arguments: tuple[str, ...], message: str
) -> None:
    assert message in here.refused(*arguments)
    assert here.live() == 2


def test_an_unknown_policy_ends_with_2_and_the_ones_there_are(whetstone: Callable[..., Ended], here: Here) -> None:
    ended = whetstone("versions", "rollback", "nobody", "--data", str(here.data))
    assert (
        ended.code == 2
        and "there is no policy 'nobody' with versions of its own; there are: second, starter" in ended.message
    )


def test_without_a_database_it_ends_with_2(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    ended = whetstone("versions", "--data", str(tmp_path))
    assert ended.code == 2 and f"there is no database in {tmp_path}" in ended.message


@pytest.mark.parametrize("named", ["starter", "starter@3", "starter@v-1", "@v1"])
def test_a_version_is_named_as_apps_name_it(here: Here, named: str) -> None:
    assert "POLICY@vN" in here.refused("versions", "export", named, "out", code=2)


def test_a_damaged_adapter_is_neither_promoted_nor_copied(here: Here) -> None:
    (here.data / "adapters" / "starter@v1" / "adapter_model.safetensors").write_bytes(b"weight?")
    moves = (
        ("versions", "promote", "starter", "1"),
        (
            "versions",
            "rollback",
        ),
        ("versions", "export", "starter@v1", str(here.data / "out")),
        ("versions", "fork", "starter@v1", "starter"),
    )
    for move in moves:
        assert "the adapter of starter@v1 is damaged" in here.refused(*move)
    assert here.live() == 2 and not (here.data / "out").exists()


def test_versions_are_listed_with_what_the_gate_found(here: Here) -> None:
    v = schema.policy_versions
    with here.engine.begin() as connection:
        figures = {
            "probe_k3": 0.00123,
            "heldout_mean": 0.625,
            "heldout_count": 128,
            "pinned_at": here.versions.seed.now,
        }
        connection.execute(update(v).where(v.c.id == "starter@v1").values(**figures))
    for arguments in (("versions",), ("versions", "starter"), ("versions", "list", "starter")):
        lines = here.run(*arguments).stdout.splitlines()
        rows = [[cell.strip() for cell in line.split("│")[1:-2]] for line in lines if line.startswith("│")]
        assert rows == [
            ["3", "2", "rejected", "worse", "", "", "no"],
            ["2", "1", "live", "", "", "", "yes"],
            ["1", "0", "retired", "", "0.0012", "0.625 (128)", "pinned"],
            ["0", "", "retired", "", "", "", "yes"],
        ]


def test_versions_are_told_to_programs(here: Here) -> None:
    told = json.loads(here.run("versions", "--json").stdout)
    assert [(one["version"], one["parent"], one["state"], one["served"]) for one in told] == [
        (3, 2, "rejected", False), (2, 1, "live", True), (1, 0, "retired", True), (0, None, "retired", True)
    ]  # fmt: skip
    assert told[0]["heldout_mean"] is None


def test_a_policy_shows_what_it_has_in_test(here: Here) -> None:
    here.versions.add("candidate", tested_by="canary")
    shown = here.run("policies", "list").stdout
    assert "4 (canary)" in shown


def adapter_of(here: Here, version: int) -> Path:
    """Give a version what a step writes."""
    folder = here.data / "adapters" / f"starter@v{version}"
    files = {
        "adapter_model.safetensors": b"weights",
        "adapter_config.json": json.dumps({"r": 16, "base_model_name_or_path": "model"}).encode(),
        "optimizer.safetensors": b"moments",
        "rng.safetensors": b"state",
    }
    told = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "base_model": {}, "files": told}))
    v = schema.policy_versions
    with here.engine.begin() as connection:
        is_it = v.c.id == f"starter@v{version}"
        connection.execute(update(v).where(is_it).values(manifest_sha256=adapters.verify(folder)))
    return folder


def test_an_export_is_what_peft_reads_and_nothing_else(here: Here) -> None:
    adapter_of(here, 1)
    out = here.data / "out" / "mine"
    assert here.run("versions", "export", "starter@v1", str(out)).exit_code == 0
    assert {path.name for path in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (out / "adapter_model.safetensors").read_bytes() == b"weights"
    assert json.loads((out / "adapter_config.json").read_bytes()) == {
        "r": 16, "base_model_name_or_path": str(STARTER)
    }  # fmt: skip
    assert "is there already; name a folder that is new or empty" in here.refused(
        "versions", "export", "starter@v1", str(out)
    )


def test_a_fork_is_the_whole_version_in_another_policy(here: Here) -> None:
    source = adapter_of(here, 1)
    second = {"WHETSTONE_POLICIES": '["second"]', "WHETSTONE_VLLM__MAX_LORAS": "8"}
    result = here.run("versions", "fork", "starter@v1", "second", **second)
    assert result.exit_code == 0, result.output
    assert "it is version 1 of second; `whetstone versions promote second 1` lets it answer" in result.stdout
    row = here.row("second@v1")
    assert (row.policy, row.version, row.parent, row.state, row.served, row.origin) == (
        "second", 1, 0, "retired", False, "starter@v1"
    )  # fmt: skip
    copied = Path(row.adapter_path)
    assert copied == here.data / "adapters" / "second@v1"
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    promoted = here.run("versions", "promote", "second", "1", **second)
    assert promoted.exit_code == 0 and "`whetstone versions rollback second` goes back to version 0" in promoted.stdout
    assert (here.live("second"), here.live()) == (1, 2)
    assert here.run("versions", "rollback", "second", **second).exit_code == 0
    assert here.live("second") == 0


def test_a_policy_is_forked_to_one_that_the_settings_name(here: Here) -> None:
    said = here.refused("versions", "fork", "starter@v1", "third", code=2)
    assert "'third' is none of: starter" in said


def test_a_copy_never_takes_the_place_of_an_adapter(here: Here) -> None:
    adapter_of(here, 1)
    (here.data / "adapters" / "starter@v4").mkdir()
    assert "never overwritten" in here.refused("versions", "fork", "starter@v1", "starter")
    assert list((here.data / "adapters" / "starter@v4").iterdir()) == []
    assert here.run("versions", "fork", "starter@v1", "starter").exit_code == 0  # the number is not given again
    assert here.row("starter@v5").origin == "starter@v1"


def test_a_copy_whose_row_is_refused_leaves_no_folder(here: Here) -> None:
    adapter_of(here, 1)
    with here.engine.begin() as connection:
        refuse = "CREATE TRIGGER no BEFORE INSERT ON policy_versions BEGIN SELECT RAISE(ABORT, 'no row'); END"
        connection.execute(text(refuse))
    before = set((here.data / "adapters").iterdir())
    assert isinstance(here.run("versions", "fork", "starter@v1", "starter").exception, IntegrityError)
    assert set((here.data / "adapters").iterdir()) == before
    with here.engine.begin() as connection:
        connection.execute(text("DROP TRIGGER no"))
    assert "it is version 5 of starter" in here.run("versions", "fork", "starter@v1", "starter").stdout


def test_a_folder_that_a_killed_copy_has_left_is_in_nobodys_way(here: Here) -> None:
    source = adapter_of(here, 1)
    with here.engine.begin() as connection:
        assert version_store.take_number(connection, "default", "starter") == 4
    orphan = shutil.copytree(source, here.data / "adapters" / "starter@v4")
    assert "it is version 5 of starter" in here.run("versions", "fork", "starter@v1", "starter").stdout
    assert here.run("versions", "promote", "starter", "5").exit_code == 0
    assert "starter has no version 4" in here.refused("versions", "promote", "starter", "4")
    assert orphan.exists() and here.live() == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("versions", "import", ".", "starter"), 1, marks=pytest.mark.long(part="stacks")),
        pytest.param(("versions", "export", "starter@v1", "out", "--merged"), 1, marks=pytest.mark.long(part="stacks")),
        (("step", "--dry-run"), 0),
        (("judge", "report"), 0),
    ],
)
def test_what_lies_in_the_working_directory_is_not_run(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    adapter_of(here, 1)
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    (downloaded / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    for module in ("msgspec", "sqlalchemy", "trainer"):
        (downloaded / f"{module}.py").write_text("open('was-run', 'w').close()\n")
    whole = [sys.executable, "-P", "-m", "whetstone.cli.main", *arguments, "--data", str(here.data)]
    ended = subprocess.run(whole, cwd=downloaded, capture_output=True, text=True, timeout=120)
    assert not (downloaded / "was-run").exists()
    assert ended.returncode == code, ended.stderr


def test_the_list_has_the_mean_reward_of_held_out_calls(here: Here) -> None:
    seed = Seed(here.engine)
    for number in range(4):
        seed.trajectory(
            f"t{number}", split="eval", state="excluded", first_version=2, last_version=2, reward=float(number > 0)
        )
    lines = here.run("versions", "starter").stdout.splitlines()
    assert [("0.750 (4)" in line, line.split()[1]) for line in lines if "live" in line] == [(True, "2")]
    assert sum("(4)" in line for line in lines) == 1
