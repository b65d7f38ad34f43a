"""The help of every command: nothing of its source is lost where it is shown."""

import inspect
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import judge.audit.__main__ as judging
import trainer.__main__ as training
from tests.unit.whetstone.cli.commands.test_trajectories import Here, here
from whetstone import __version__
from whetstone.cli.lazy import LazyCommand, loaded
from whetstone.cli.main import app
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.registry.projects import Store

__all__ = ["here"]
ROOTS = {"whetstone": app, "judge": judging.app, "trainer": training.app}


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, each with the words that lead to it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(loaded(inner), (*path, name))


ALL = [pair for name, root in ROOTS.items() for pair in commands(typer.main.get_command(root), (name,))]


def sources(command: Any) -> Iterator[str]:
    """Every paragraph, and the help of every option and argument."""
    yield from (command.help or "").split("\n\n")
    yield from (command.epilog or "").split("\n\n")
    yield from (getattr(one, "help", None) or "" for one in command.params)


def letters(text: str) -> str:
    """Without white space, frames, and what Markdown takes for itself: ` and the signs of a list."""
    return re.sub(r"[\s`│╭╮╰╯─]|^\s*[-*] ", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_help_shows_all_that_its_source_says(path: tuple[str, ...], command: Any) -> None:
    if not command.add_help_option:
        return  # it hands its arguments on to another program, whose own tree is among ROOTS
    shown = CliRunner().invoke(ROOTS[path[0]], [*path[1:], "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    lost = [text for text in sources(command) if letters(text) not in letters(shown.output)]
    assert lost == []


def test_the_version_is_an_option() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"whetstone {__version__}\n")


def test_the_list_of_commands_has_the_first_paragraph_of_each_help() -> None:
    root: Any = typer.main.get_command(app)
    lazy = {name: command for name, command in root.commands.items() if isinstance(command, LazyCommand)}
    assert len(lazy) >= 20
    for name, command in lazy.items():
        first, *_ = inspect.cleandoc(command.load().help or "").split("\n\n")
        assert command.help == " ".join(first.split()), name


def test_help_loads_neither_our_settings_nor_the_database() -> None:
    program = [sys.executable, "-P", "-X", "importtime", "-m", "whetstone.cli.main"]
    ended = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True)
    loaded_names = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "typer" in loaded_names
    assert not {"sqlalchemy", "pydantic", "httpx", "msgspec", "whetstone.cli.options"} & loaded_names


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_each_example_has_a_line_of_its_own(path: tuple[str, ...], command: Any) -> None:
    if not command.add_help_option:
        return
    shown = CliRunner().invoke(ROOTS[path[0]], [*path[1:], "--help"], env={"COLUMNS": "400", "NO_COLOR": "1"})
    lines = [line.strip() for line in shown.output.splitlines()]
    assert [line for line in examples(command) if line not in lines] == []


@pytest.mark.parametrize("group", ["keys", "policies", "models", "versions"])
def test_a_group_alone_is_its_list(group: str, sqlite_template: Path, tmp_path: Path) -> None:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    Store(connect(f"sqlite:///{tmp_path / 'whetstone.db'}")).prepare(Settings(data=tmp_path))
    options = [] if group == "models" else ["--data", str(tmp_path)]
    alone, listed = (CliRunner().invoke(app, [group, *command, "--json", *options]) for command in ((), ("list",)))
    assert alone.exit_code == 0 and alone.stdout == listed.stdout
    if group != "versions":  # there, it is the name of a policy
        assert "No such command" in CliRunner().invoke(app, [group, "nonsense"]).output
    assert "Usage" in CliRunner().invoke(app, [group, "--help"]).output


def test_what_prints_tables_or_figures_prints_json_too() -> None:
    without = {
        "whetstone up": "runs until it is stopped; up.json has the addresses",
        "whetstone puller": "runs until it is stopped; its log says what it pulls",
        "whetstone init": "asks questions, and prints what to do next",
        "whetstone migrate": "prints a sentence",
        "whetstone sql-role": "prints a URL",
        "whetstone judge": "another program, which is among ROOTS",
        "whetstone logs": "prints what programs wrote; log.format makes that JSON",
        "whetstone models get": "its last line is the folder",
    }
    plain = {
        " ".join(path)
        for path, command in ALL
        if not hasattr(command, "commands") and not any("--json" in one.opts for one in command.params)
    }
    assert plain == without.keys()


def examples(command: Any) -> list[str]:
    """Return the command lines in a command's help."""
    return [line.strip() for line in inspect.cleandoc(command.help or "").splitlines() if line.startswith("    ")]


EXAMPLES = [(path, line) for path, command in ALL if path[0] != "judge" for line in examples(command)]


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_each_help_has_an_example_of_its_own_command(path: tuple[str, ...], command: Any) -> None:
    # Below `whetstone judge` and `whetstone step --dry-run` are programs of their own.
    words = {"judge": ("whetstone", *path), "trainer": ("whetstone", "step", "--dry-run")}.get(path[0], path)
    lines = examples(command) if path != ("judge",) else ["whetstone judge"]
    own = tuple(word for word in words if word != "list")
    assert any(set(own) <= set(shlex.split(line.replace("$(", " ").replace(")", " "))) for line in lines), lines


def words_of(line: str) -> list[str]:
    """Return the words of a shell's line up to a pipe or a redirection."""
    return list(itertools.takewhile(lambda word: word not in ("|", ">"), shlex.split(line)))


def parse(words: list[str]) -> None:
    """Parse a command line as the program does, and run nothing."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("whetstone", words)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("path", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_every_example_is_a_command_line_that_is_understood(path: tuple[str, ...], line: str) -> None:
    program, *words = words_of(re.sub(r"^\w+=\$\((.*)\)$", r"\1", line))
    assert program == "whetstone"
    parse(words)


NEED_MORE = {
    "whetstone up": "starts a stack", "whetstone demo": "starts a stack", "whetstone step": "needs a stack",
    "whetstone tail": "runs until it is stopped", "whetstone init": "asks questions",
    "whetstone replay": "needs a stack", "whetstone logs": "needs logs", "whetstone sql-role": "PostgreSQL",
    "whetstone judge": "another program", "whetstone models get": "fetches a model", "whetstone import": "needs a log",
    "whetstone doctor": "needs a vLLM or a model", "whetstone versions export": "needs an adapter",
    "whetstone versions import": "needs an adapter", "whetstone versions fork": "needs an adapter",
    "whetstone versions promote": "needs an adapter", "whetstone versions rollback": "needs an adapter",
    "whetstone versions pin": "needs an adapter", "KEY=": "a shell's variable",
    "whetstone sql --csv -f": "needs a file", "whetstone keys revoke": "needs a key",
    "whetstone models": "lists what is in the cache folder", "whetstone export preferences": "needs pyarrow",
    "whetstone export trajectories": "needs pyarrow", "whetstone backup /backups": "needs that folder",
    "whetstone restore": "needs a backup", "whetstone puller": "needs an adapter store",
    "whetstone docs": "no database: tests/unit/whetstone/cli/commands/test_docs.py",
}  # fmt: skip
"""Beginnings of examples that need more than a database, and what."""
RUNNABLE = [line for _, line in EXAMPLES if not line.startswith(tuple(NEED_MORE))]


@pytest.mark.parametrize("line", dict.fromkeys(RUNNABLE))
def test_examples_run_on_a_database(line: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here.data)
    here.seed.group("g-3")
    here.seed.trajectory("game-17", "g-3", reward=1.0, state="rewarded", end_user="alice")
    result = here.run(*words_of(line)[1:])
    assert result.exit_code in (0, 1) and (result.exception is None or isinstance(result.exception, SystemExit))


def test_most_commands_have_an_example_that_runs_here() -> None:
    assert len(set(RUNNABLE)) >= 15
