"""The help of every command: nothing of its source is lost where it is shown."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import judge.audit.__main__ as judging
import trainer.__main__ as training
from whetstone import __version__
from whetstone.cli.main import app

ROOTS = {"whetstone": app, "judge": judging.app, "trainer": training.app}


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, each with the words that lead to it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


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


@pytest.mark.parametrize("group", ["keys", "policies", "models"])
def test_a_group_alone_is_its_list(group: str, sqlite_template: Path, tmp_path: Path) -> None:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    options = [] if group == "models" else ["--data", str(tmp_path)]
    alone, listed = (CliRunner().invoke(app, [group, *command, "--json", *options]) for command in ((), ("list",)))
    assert alone.exit_code == 0 and alone.stdout == listed.stdout
    assert "No such command" in CliRunner().invoke(app, [group, "nonsense"]).output
    assert "Usage" in CliRunner().invoke(app, [group, "--help"]).output


def test_what_prints_tables_or_figures_prints_json_too() -> None:
    without = {
        "whetstone up": "runs until it is stopped; up.json has the addresses",
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
