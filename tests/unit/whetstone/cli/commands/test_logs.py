"""`whetstone logs`: the last lines of each part, and what is written while it follows."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from whetstone.cli.commands import logs
from whetstone.cli.main import app
from whetstone.config.settings import SettingsError


def run(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["logs", *arguments, "--data", str(data)])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "proxy.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "logs" / "trainer.log").write_text("only\n")
    return tmp_path


def test_the_last_lines_of_one_part_are_shown_as_they_are(data: Path) -> None:
    assert run(data, "proxy", "--lines", "3").stdout == "line 97\nline 98\nline 99\n"
    assert run(data, "proxy", "-n", "0").stdout == ""
    assert len(run(data, "proxy").stdout.splitlines()) == 20
    assert len(run(data, "proxy", "-n", "500").stdout.splitlines()) == 100


def test_several_parts_are_shown_behind_their_names(data: Path) -> None:
    assert run(data, "-n", "1").stdout == "proxy   | line 99\ntrainer | only\n"


def test_a_part_without_a_log_and_a_folder_without_any_say_what_there_is(data: Path, tmp_path: Path) -> None:
    refused = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["logs", "nginx", "--data", str(data)])
    assert refused.exit_code == 2 and "proxy, trainer" in refused.output
    empty = run(tmp_path / "elsewhere")
    assert isinstance(empty.exception, SettingsError) and "whetstone up" in str(empty.exception)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("text", ["", "a", "\n", "a\n", "a\nb", "a\n\nb\n", "\n\n\n", "äöü\n" * 50])
def test_a_file_of_any_size_is_read_from_its_end(
    text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BLOCK", 4)
    path = tmp_path / "a.log"
    path.write_text(text)
    whole = text.split("\n")[:-1]
    shown = list(logs._Tail(path, size).new_lines())
    # A last line that has not ended is shown once it has.
    assert shown == (whole[-size:] if size else [])


def test_a_last_line_that_has_not_ended_is_shown_too(data: Path) -> None:
    with (data / "logs" / "proxy.log").open("a") as log:
        log.write("Fatal")
    assert run(data, "proxy", "-n", "1").stdout == "line 99\nFatal\n"


def test_a_part_of_several_processes_is_shown_by_the_name_they_share(data: Path) -> None:
    for number in (1, 2):
        (data / "logs" / f"vllm-{number}.log").write_text(f"server {number}\n")
    assert run(data, "vllm").stdout == "vllm-1  | server 1\nvllm-2  | server 2\n"
    assert run(data, "vllm-2").stdout == "server 2\n"


def test_a_log_that_cannot_be_read_is_an_error_with_its_path(data: Path) -> None:
    (data / "logs" / "judge.log").mkdir()
    result = run(data, "judge")
    assert isinstance(result.exception, SettingsError) and "judge.log cannot be read" in str(result.exception)


@pytest.mark.slow
def test_a_reader_that_has_read_enough_ends_it_without_an_error(data: Path) -> None:
    (data / "logs" / "proxy.log").write_text("line\n" * 100_000)
    command = [sys.executable, "-m", "whetstone.cli.main", "logs", "proxy", "-n", "100000", "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""


def test_a_file_that_goes_or_is_cut_is_read_from_its_new_beginning(data: Path) -> None:
    path = data / "logs" / "proxy.log"
    tail = logs._Tail(path, 1)
    assert list(tail.new_lines()) == ["line 99"]
    path.write_text("cut\n")
    assert list(tail.new_lines()) == ["cut"]
    path.unlink()
    assert list(tail.new_lines()) == []
    path.write_text("new\n")
    assert list(tail.new_lines()) == ["new"]


@pytest.fixture
def following(data: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-u", "-m", "whetstone.cli.main", "logs", "-f", "-n", "1", "--data", str(data)]
    # A test run in the background ignores SIGINT, and what it starts would, too.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:  # noqa: PLW1509
        yield process
        process.kill()


@pytest.mark.slow
def test_what_is_written_follows_across_half_lines_new_parts_and_replaced_files(
    data: Path, following: "subprocess.Popen[str]"
) -> None:
    assert following.stdout is not None
    lines = iter(following.stdout.readline, "")
    assert [next(lines), next(lines)] == ["proxy   | line 99\n", "trainer | only\n"]
    with (data / "logs" / "trainer.log").open("a") as log:
        log.write("half ")
        log.flush()
        time.sleep(2 * logs.POLL_S)
        log.write("a line\n")
    assert next(lines) == "trainer | half a line\n"
    (data / "logs" / "vllm.log").write_text("new\n")
    assert next(lines) == "vllm    | new\n"
    fresh = data / "logs" / "fresh"
    fresh.write_text("again\n")
    fresh.replace(data / "logs" / "proxy.log")
    assert next(lines) == "proxy   | again\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 0
