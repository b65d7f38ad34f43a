"""`whetstone doctor`: where it looks, what it keeps, what it shows, how it ends."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import Engine
from typer.testing import CliRunner, Result

from migrations import schema
from tests.unit.proxy.conftest import wait_for
from tests.unit.whetstone.conftest import FakeVllm
from whetstone.cli.main import app
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.doctor.vllm_checks import (
    NothingToTest,
    at_start,
    examine,
    in_short,
    last_test,
    shown,
)
from whetstone.registry.projects import Store
from whetstone.stack.admin_client import ProxyUnreachable, launch_arguments, of_running
from whetstone.vllm.client import command as vllm_command
from whetstone.vllm.self_test import questions as self_test_questions
from whetstone.vllm.self_test.questions import ADAPTERS, CALL, PLAIN, SEEDS, Check, knowing
from whetstone.vllm.self_test.run import SelfTest

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TEST = SelfTest(
    "starter@v0", "0.32.0", NOW, False,
    (PLAIN.answer(True, "14 prompt ids [/b]"), ADAPTERS.answer(False, "off"), CALL.answer(None, "no whole call"),
     SEEDS.answer(False, "other ids")),
)  # fmt: skip


def write_addresses(data: Path, **changed: Any) -> None:
    """up.json as `up` writes it."""
    addresses = {
        "proxy": "http://127.0.0.1:8000", "vllm": "http://127.0.0.1:8001", "replicas": ["http://127.0.0.1:8001"],
        "database": f"sqlite:///{data}/whetstone.db",
        "broker": "redis://", "policy": "starter", "served": "starter@v0", "pids": {"up": 1},
    }  # fmt: skip
    (data / "up.json").write_text(json.dumps(addresses | changed))


def doctor(data: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["doctor", "--data", str(data), *arguments])


def text(test: SelfTest, *, width: int = 120, verbose: bool = False) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(shown(test, verbose=verbose))
    return capture.get()


@pytest.fixture
def data(tmp_path: Path, sqlite_template: Path) -> Path:
    """The data folder of a stack that was started once."""
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    Store(connect(f"sqlite:///{tmp_path / 'whetstone.db'}")).prepare(Settings(data=tmp_path))
    return tmp_path


def test_a_stack_that_runs_says_where_everything_is(tmp_path: Path) -> None:
    servers = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    write_addresses(tmp_path, database="sqlite:////elsewhere.db", policy="mine", replicas=servers)
    settings = of_running(Settings(data=tmp_path, vllm={"threads": 3}))
    assert (settings.vllm.urls, settings.vllm.threads) == (tuple(servers), 3)
    assert (settings.database_url, settings.policy) == ("sqlite:////elsewhere.db", "mine")


def test_without_a_stack_the_settings_say_it(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, vllm={"urls": ("http://10.0.0.1:8000",)})
    assert of_running(settings) == settings


def test_damaged_addresses_are_no_riddle(tmp_path: Path) -> None:
    write_addresses(tmp_path, replicas=None)
    with pytest.raises(ProxyUnreachable, match=r"up\.json cannot be read"):
        of_running(Settings(data=tmp_path))


def test_without_an_address_nothing_is_tested(tmp_path: Path) -> None:
    with pytest.raises(NothingToTest, match="no stack runs on .*`whetstone up`"):
        examine(Settings(data=tmp_path))


def test_nobody_at_the_address_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingToTest, match="no vLLM answers at http://127.0.0.1:1"):
        examine(Settings(data=tmp_path, vllm={"urls": ("http://127.0.0.1:1",)}))


def test_somebody_else_at_the_address_is_said(fake_vllm: Any) -> None:
    fake_vllm.whole = 200, b"<html>welcome</html>"
    with pytest.raises(NothingToTest, match="is no vLLM"):
        examine(Settings(vllm={"urls": (fake_vllm.url,)}))


def test_another_model_at_the_address_is_said(fake_vllm: Any) -> None:
    fake_vllm.served = "llama"
    with pytest.raises(NothingToTest, match="serves llama, but not starter@v0"):
        examine(Settings(vllm={"urls": (fake_vllm.url,)}))


def test_of_several_servers_each_is_tested_and_the_one_that_cannot_be_relied_on_is_shown(fake_vllm: Any) -> None:
    with FakeVllm() as other:
        settings = Settings(vllm={"urls": (fake_vllm.url, other.url)})
        assert examine(settings).trainable and other.asked
        other.takes_adapters = False
        test = examine(settings)
    assert (test.address, test.trainable) == (other.url, False)
    assert f"vLLM 0.32.0 at {other.url}" in " ".join(text(test).split())


def test_one_of_several_servers_that_does_not_answer_is_named(fake_vllm: Any) -> None:
    with pytest.raises(NothingToTest, match="no vLLM answers at http://127.0.0.1:1"):
        examine(Settings(vllm={"urls": (fake_vllm.url, "http://127.0.0.1:1")}))


def test_a_test_is_kept_whole_and_read_again(seed: Any, engine: Engine) -> None:
    store = Store(engine)
    assert store.keep_self_test("default", "starter", TEST)
    assert last_test(Settings(), store) == TEST
    assert seed.one(schema.policies, "starter").self_tested_at == NOW


def test_a_test_of_another_tenants_policy_is_not_shown(seed: Any, engine: Engine) -> None:
    seed.project("other")
    assert Store(engine).keep_self_test("other", "starter", TEST)
    with pytest.raises(NothingToTest, match="no self-test of starter is stored"):
        last_test(Settings(), Store(engine))


def test_a_test_of_a_policy_that_is_not_there_is_not_kept(seed: Any, engine: Engine) -> None:
    assert not Store(engine).keep_self_test("default", "nobody", TEST)


def test_a_start_keeps_its_test_and_says_what_is_amiss(seed: Any, engine: Engine, fake_vllm: Any) -> None:
    fake_vllm.mode, settings, said = "raw", Settings(vllm={"urls": (fake_vllm.url,)}), list[str]()
    at_start(settings, Store(engine), said.append)
    assert not last_test(settings, Store(engine)).trainable
    assert said[0].startswith("self-test failed; sampling defaults could not be tested; no: logprob mode (")
    assert len(said) == 2 and "--logprobs-mode processed_logprobs" in said[1]


def test_a_start_names_each_check_that_did_not_answer_yes() -> None:
    def short(*checks: Check) -> str:
        return in_short(SelfTest("m", "0.32.0", NOW, True, checks))

    assert short(PLAIN.answer(True, "")) == "self-test passed"
    calls = CALL.answer(None, "no whole call within 192 tokens")
    assert short(calls) == "self-test passed; tool calls could not be tested with this model"
    noes = (calls, ADAPTERS.answer(None, "502"), SEEDS.answer(False, "other ids"))
    assert short(*noes) == (
        "self-test passed; tool calls could not be tested with this model; adapters at run time could not be tested; "
        "no: seeds"
    )


@pytest.mark.parametrize("ok", [False, None])
def test_nobody_is_told_to_set_a_flag_that_is_set(ok: bool | None) -> None:
    check = CALL.answer(ok, "the model was required to call a tool, and no call came")
    assert knowing(check, ["python3", "--tool-call-parser", "hermes"]) == check
    means = knowing(check, vllm_command(Settings(), 8001)).means
    assert "start vLLM with" not in means and "check vLLM's" not in means
    assert means.startswith("vLLM was started with --enable-auto-tool-choice --tool-call-parser hermes. So no flag is")
    assert "this model does not write tool calls" in means
    yes = CALL.answer(True, "")
    assert knowing(yes, vllm_command(Settings(), 8001)) == yes


def test_the_flags_of_a_stack_that_runs_are_those_of_its_process(tmp_path: Path, fake_vllm: Any) -> None:
    """A model that calls no tool, behind a vLLM that was started with every flag for tools."""
    fake_vllm.calls_tools = False
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=subprocess.PIPE) as process:
        write_addresses(tmp_path, replicas=[fake_vllm.url], pids={"up": 1, "vllm": process.pid})
        wait_for(lambda: len(launch_arguments(tmp_path)) > 1)  # for a moment a new process has no arguments
        assert launch_arguments(tmp_path)[-4:-1] == arguments
        told = json.loads(doctor(tmp_path, "--json").output.splitlines()[0])
        process.communicate(b"\n")
    (check,) = [check for check in told["checks"] if check["name"] == CALL.name]
    assert check["ok"] is False and "no flag is missing" in check["means"]
    assert launch_arguments(tmp_path) == [] == launch_arguments(tmp_path / "nowhere")


def test_a_start_is_not_stopped_by_a_server_that_does_not_answer(seed: Any, engine: Engine) -> None:
    said: list[str] = []
    at_start(Settings(vllm={"urls": ("http://127.0.0.1:1",)}), Store(engine), said.append)
    assert said[0].startswith("no self-test: no vLLM answers")
    assert Store(engine).self_test("default", "starter") is None


def test_everything_found_is_shown_with_what_it_means() -> None:
    shown_text = " ".join(text(TEST, verbose=True).replace("│", " ").split())
    assert "starter@v0 on vLLM 0.32.0, 2026-01-01 12:00:00 UTC" in shown_text
    for check, answer in zip(TEST.checks, ("yes", "no", "could not tell", "no"), strict=True):
        assert f"{check.name} {answer} {check.found} {check.means.split()[0]}" in shown_text
    assert "training cannot rely on this server: adapters at run time" in shown_text


def test_the_worst_comes_first_and_what_is_well_takes_a_line() -> None:
    lines = text(TEST).splitlines()
    marks = [line[0] for line in lines[1:-1] if line[0] != " "]
    assert marks == ["✗", "!", "?", "✓"]
    assert lines[1].startswith(f"✗ {ADAPTERS.name}: off") and ADAPTERS.no[:40] in lines[2]
    assert lines[-2].strip() == f"✓ {PLAIN.name}"
    assert f"? could not be tested (--verbose says why): {CALL.name}" in text(TEST)
    assert CALL.unknown[:30] not in text(TEST)


def test_every_check_fits_on_one_screen_even_if_half_of_them_fail() -> None:
    questions = [one for one in vars(self_test_questions).values() if isinstance(one, self_test_questions.Question)]
    assert len(questions) >= 9
    checks = tuple(one.answer(number % 2 == 0, "x" * 60) for number, one in enumerate(questions))
    assert len(text(SelfTest("m", "1", NOW, False, checks), width=80).splitlines()) <= 24
    well = SelfTest("m", "1", NOW, True, tuple(one.answer(True, "x" * 60) for one in questions))
    assert len(text(well, width=80).splitlines()) <= 6


def test_a_server_that_did_not_answer_in_time_is_not_relied_on() -> None:
    test = SelfTest("m", None, NOW, False, (PLAIN.answer(None, "the time was over"), SEEDS.answer(None, "")))
    assert "training cannot rely on this server: ids in plain answers" in text(test)
    assert "m on a server of unknown version" in text(test)


def test_the_command_shows_and_stores(data: Path, fake_vllm: Any) -> None:
    write_addresses(data, replicas=[fake_vllm.url])
    result = doctor(data)
    assert result.exit_code == 0, result.output
    assert "all that training needs is there" in result.output
    fake_vllm.whole = 500, b"down"
    stored = doctor(data, "--stored")
    assert (stored.exit_code, stored.output) == (0, result.output)


def test_the_command_ends_with_1_where_training_cannot_rely_on_the_server(data: Path, fake_vllm: Any) -> None:
    write_addresses(data, replicas=[fake_vllm.url])
    fake_vllm.takes_adapters = False
    assert doctor(data).exit_code == 1
    stored = doctor(data, "--stored", "--json")
    assert stored.exit_code == 1
    test = json.loads(stored.output)
    assert (test["served"], test["vllm_version"], test["trainable"]) == ("starter@v0", "0.32.0", False)
    (check,) = [check for check in test["checks"] if check["ok"] is False]
    assert check == {
        "name": ADAPTERS.name,
        "ok": False,
        "needed": True,
        "found": "off: vLLM has no route to load them",
        "means": ADAPTERS.no,
    }


def test_a_vllm_can_be_tested_before_the_first_start(tmp_path: Path, fake_vllm: Any) -> None:
    config = tmp_path / "whetstone.toml"
    config.write_text(f'[vllm]\nurls = "{fake_vllm.url}"\n')
    result = doctor(tmp_path, "--config", str(config))
    assert result.exit_code == 0
    assert "not stored" in result.stderr
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((), "no vLLM answers at http://127.0.0.1:1"), (("--stored",), "no self-test of starter is stored")],
)
def test_where_nothing_can_be_tested_the_command_ends_with_2(
    data: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    write_addresses(data, replicas=["http://127.0.0.1:1"])
    command = [sys.executable, "-m", "whetstone.cli.main", "doctor", "--data", str(data), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
