"""Lines of logs: their form, what they are about, and what is in none of them."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetstone.config.settings import LogSettings, Settings, as_environment
from whetstone.observability import log_setup

ROOT = Path(__file__).parents[4]
log = logging.getLogger("tests.logs")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, left as it was found."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_json_line_has_time_level_logger_message_and_what_it_is_about(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_setup.set_up(LogSettings(format="json"))
    with log_setup.about(call="c1", group=None), log_setup.about(trajectory="t1", step=3):
        log.info("took %d", 7)
    log.info("outside")
    first, second = written(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO", "logger": "tests.logs", "message": "took 7", "call": "c1", "trajectory": "t1", "step": 3,
    }  # fmt: skip
    assert set(second) == {"time", "level", "logger", "message"}


def test_a_text_line_has_the_same(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_setup.set_up(LogSettings())
    with log_setup.about(call="c1", groups=["a", "b"]):
        log.warning("no")
    assert capsys.readouterr().err.endswith("Z WARNING tests.logs: no [call=c1 groups=a,b]\n")


def test_what_work_is_about_holds_in_its_tasks_and_in_no_other(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work(name: str) -> None:
        with log_setup.about(call=name):
            await asyncio.sleep(0)
            await asyncio.to_thread(log.info, name)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    log_setup.set_up(LogSettings(format="json"))
    asyncio.run(both())
    told = [(line["message"], line["call"]) for line in written(capsys) if line["logger"] == log.name]
    assert sorted(told) == [("a", "a"), ("b", "b")]


def test_an_exception_is_a_field_of_its_line(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_setup.set_up(LogSettings(format="json"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed")
    (line,) = written(capsys)
    assert line["message"] == "failed"
    assert line["exception"]["type"] == "ValueError"
    assert line["exception"]["stack"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize("said", ["a\n2026-01-01T00:00:00.000Z INFO proxy: forged", "a\r\x1b[2J", "a\u2028b", "a\x85b"])
def test_who_chooses_a_text_begins_no_line(root: logging.Logger, capsys: pytest.CaptureFixture[str], said: str) -> None:
    log_setup.set_up(LogSettings())
    with log_setup.about(trajectory=said):
        log.info("path %s", said)
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and told[:-1].isprintable()


def test_the_lines_of_an_exception_are_told_from_others(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_setup.set_up(LogSettings())
    try:
        raise ValueError("one\n2026-01-01T00:00:00.000Z INFO proxy: forged")
    except ValueError:
        log.exception("failed")
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("ERROR tests.logs: failed")
    assert others and all(one.startswith("  ") for one in others)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    ("said", "secret"),
    [
        ("postgresql+psycopg://app:hunter2/7@db.example/whetstone", "hunter2"),
        ("redis://:hunter2@broker:6379/0", "hunter2"),
        ("amqp://app:12345@broker//", "12345"),
        ("a key wsk_0a1b2c_hunter2hunter2", "hunter2"),
        ("a token wft_hunter2hunter2", "hunter2"),
        ("Authorization: Bearer hunter2.hunter2", "hunter2"),
        ("the environment has no sk-hunter2hunter2", "hunter2"),
        ("host=db password=hunter2 dbname=w", "hunter2"),
    ],
)
def test_keys_and_passwords_are_blotted_out(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], form: log_setup.Format, said: str, secret: str
) -> None:
    log_setup.set_up(LogSettings(format=form))
    log.info("%s", said)
    try:
        raise RuntimeError(said)
    except RuntimeError:
        log.exception("failed")
    told = capsys.readouterr().err
    assert secret not in told and told.count("***") == 2


_PIECES = (
    "://,a:b,@,wsk_,wft_,Bearer ,basic ,sk-,password,passwd,API_KEY,apikey,Secret,=, ,"
    "hunter2hunter2,pa\u017fsword,s\u212a-"
)


@given(st.lists(st.sampled_from(_PIECES.split(","))))
def test_what_is_looked_for_first_is_all_that_can_be_found(pieces: list[str]) -> None:
    """In whatever case: a long s and the sign for kelvin are an s and a k there."""
    text = "".join(pieces)
    assert ("***" in log_setup.hidden(text)) == bool(log_setup._SECRETS.search(text))


def test_addresses_without_a_password_stay_whole() -> None:
    said = (
        "vLLM at http://127.0.0.1:8000/v1/models/starter@v3 and http://127.0.0.1:8001: starter@v3 in redis://b:6379/0"
    )
    assert log_setup.hidden(said) == said


def test_below_the_level_nothing_is_written_but_that_a_worker_is_ready(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_setup.set_up(LogSettings(level="warning"))
    log.info("not this")
    log.warning("this")
    logging.getLogger("celery.apps.worker").info("judge@host ready.")
    logging.getLogger("httpx").info("not this")
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == ["this", "judge@host ready."]


def test_set_up_twice_each_line_is_written_once(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_setup.set_up(LogSettings())
    log_setup.set_up(LogSettings(format="json"))
    log.info("once")
    (line,) = written(capsys)
    assert line["message"] == "once"


def test_warnings_and_the_servers_own_lines_have_the_same_form(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler())
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log_setup.set_up(LogSettings(format="json"))
        warnings.warn("old", stacklevel=1)
        logging.getLogger("uvicorn.error").error("broken")
    assert [line["logger"] for line in written(capsys)] == ["py.warnings", "uvicorn.error"]


def test_a_supervisor_writes_into_a_log_in_its_form() -> None:
    assert json.loads(log_setup.line("json", "supervisor", "killed"))["message"] == "killed"
    assert log_setup.line("text", "supervisor", "killed").endswith("Z INFO supervisor: killed")


@pytest.mark.slow
def test_a_workers_log_is_json_where_json_is_asked_for(tmp_path: Path, sqlite_template: Path) -> None:
    settings = Settings(
        data=tmp_path, database=f"sqlite:///{sqlite_template}", broker="memory://", log=LogSettings(format="json")
    )
    command = [sys.executable, "-m", "celery", "-A", "judge.tasks", "--quiet", "worker", "--pool", "solo"]
    # Celery warns whoever runs it as root, before anybody has set up logs.
    environment = {**os.environ, **as_environment(settings), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, "--without-gossip", "--without-mingle"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as worker:  # fmt: skip
        try:
            assert worker.stdout is not None
            lines = []
            while not lines or " ready." not in lines[-1]["message"]:
                lines.append(json.loads(worker.stdout.readline()))
        finally:
            worker.kill()
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
