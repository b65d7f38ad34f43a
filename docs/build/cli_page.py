"""The page docs/cli.md, made from the command line itself: every command, its help, its arguments and options."""

import inspect
from collections.abc import Iterator
from typing import Any

import typer.main

from whetstone.cli.lazy import loaded
from whetstone.cli.main import EXIT_CODES, app

HEAD = """# The command line

`whetstone COMMAND --help` says the same, `whetstone --version` which version it is. Every command takes `--data DIR`,
the folder that the stack runs on (`data` without it), and `--config FILE`. What prints facts takes `--json`: one array
or object on stdout, with the names of the [views](views.md); notes go to stderr. In a pipe, and with `NO_COLOR` set,
nothing is coloured.

A list has a row for each object. On a terminal that is too narrow for it, ids are shortened in the middle
(`019b2c…4b5c6d`), and what matters least is left out, which the last line says; `--wide` shows all. In a pipe, and as
JSON, nothing is shortened or left out.
"""
NOT_RUN = "<!-- not run: an example of the help; each command has tests of its own -->"
COMPLETION = """## Completion

`whetstone --install-completion` teaches your shell (bash, zsh, fish) the commands, options and the names of policies;
`whetstone --show-completion` prints what it would add.
"""


def page() -> str:
    """Its text, without the line that says who made it."""
    root: Any = typer.main.get_command(app)
    return "\n".join([HEAD, f"{EXIT_CODES}\n", COMPLETION, *_commands(root, ("whetstone",))])


def _commands(group: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in sorted(group.commands):
        command = loaded(group.commands[name])
        if command.hidden:
            continue
        path = (*names, name)
        yield f"{'#' * min(len(path), 4)} {' '.join(path)}\n"
        yield _help(command.help or "")
        if hasattr(command, "commands"):
            yield from _commands(command, path)
        else:
            yield from _parameters(command)


def _help(text: str) -> str:
    """Return the paragraphs; indented examples become code."""
    parts: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("    "):
            parts.append(f"{NOT_RUN}\n```\n{inspect.cleandoc(paragraph)}\n```\n")
        else:
            parts.append(" ".join(paragraph.split()) + "\n")
    return "\n".join(parts)


def _parameters(command: Any) -> Iterator[str]:
    shown = [one for one in command.params if one.name != "help" and one.name not in ("data", "config")]
    if not shown:
        return
    context = typer.Context(command)
    yield "| | | |\n|---|---|---|"
    for one in shown:
        is_argument = one.param_type_name == "argument"
        names = one.metavar or one.name if is_argument else ", ".join(one.opts)
        is_flag = not is_argument and one.is_flag
        kind = "" if is_flag else one.display_type(context).strip("<>").replace("|", " or ")
        meaning = f"{'needed. ' if one.required else ''}{one.help or ''}".replace("|", "\\|")
        yield f"| `{names}` | {kind} | {meaning} |"
    yield ""
