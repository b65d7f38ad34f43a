"""Commands whose modules are imported when they run: the help of `whetstone`, its completion and each command load
nothing of the other commands.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from whetstone.errors import WhetstoneError

STYLE: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}
"""How all help is written."""


class LazyCommand(TyperCommand):
    """The name of a command, or of a group of commands, and the line about it in the list of all commands."""

    def __init__(self, name: str, target: str, summary: str, panel: str) -> None:
        """Define the command.

        Args:
            name: the word on the command line.
            target: where its function, or its `typer.Typer`, is: `package.module:attribute`.
            summary: the first paragraph of its help. A test compares the two.
            panel: title of the part of the list that it belongs to.
        """
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._target = target

    def load(self) -> Any:
        """Import the command and return it."""
        module, _, attribute = self._target.partition(":")
        target = getattr(import_module(module), attribute)
        parent = typer.Typer(**STYLE)
        if isinstance(target, typer.Typer):
            parent.add_typer(target, name=self.name)
        else:
            parent.command(self.name)(target)
        assert self.name is not None
        return get_group(parent).commands[self.name]


class LazyGroup(TyperGroup):
    """A group with commands that are loaded when they run. A refused command ends with its message and exit code 1."""

    lazy: Sequence[LazyCommand] = ()

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.commands = {**{command.name or "": command for command in self.lazy}, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, loaded(command), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WhetstoneError as error:
            if error.exit_code != 1:
                raise
            from whetstone.cli.options import fail

            fail(str(error))


def loaded(command: Any) -> Any:
    """Return a command whose parameters and commands are known: imported, if it was not yet."""
    return command.load() if isinstance(command, LazyCommand) else command
