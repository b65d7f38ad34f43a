"""Shared parts of the commands: options, settings, consoles, access to the database."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from sqlalchemy import Engine
from sqlalchemy.exc import ArgumentError, DBAPIError
from typer.core import TyperGroup

from migrations.run import MigrationError, upgrade
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.errors import WhetstoneError
from whetstone.registry.projects import Store
from whetstone.stack.admin_client import of_running

console = Console()
errors = Console(stderr=True)


class ListsByDefault(TyperGroup):
    """Run a group's `list` where no command is given: `keys`, `keys --json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # While the shell completes, the words that are there decide.
        if not ctx.resilient_parsing and (not args or (args[0] != "--help" and self.lists(args[0]))):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def lists(self, word: str) -> bool:
        """Return whether a first word belongs to `list`."""
        return word.startswith("-")


DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of database, adapters and logs [data]")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file [whetstone.toml, if it is there]")]


def policy_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the policies of the settings, for shell completion; empty if the settings cannot be read."""
    try:
        settings = load(ctx.params.get("config"), data=ctx.params.get("data"))
        names = {*settings.all_trained, *(name for one in settings.upstreams.values() for name in one.models)}
        if has_database(settings):
            own = Store(connect(settings.database_url))
            names |= {row["id"] for of in settings.of_projects() for row in own.policies(of.project)}
    except Exception:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


PolicyOption = Annotated[
    str | None, typer.Option("--policy", help="Only this one [all of the project]", autocompletion=policy_names)
]
PolicyArgument = Annotated[
    str | None, typer.Argument(help="Its name [the default policy]", autocompletion=policy_names)
]
ProjectOption = Annotated[str | None, typer.Option("--project", help="The tenant [the home project]")]
WideOption = Annotated[
    bool, typer.Option("--wide", help="Show all columns and whole ids, however narrow the terminal is")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one array")]
JsonObjectOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object")]


def running_settings(data: Path | None, config: Path | None) -> Settings:
    """Return the settings, with the addresses of the stack that runs on the data folder, if one does."""
    return of_running(load(config, data=data))


def store_of(settings: Settings) -> Store:
    """Return the tables, migrated to this version's schema.

    Raises:
        SettingsError: there is no database.
    """
    return Store(engine_of(settings))


def engine_of(settings: Settings, *, create: bool = False) -> Engine:
    """Return an engine on the database, migrated to this version's schema; `create`: make it if there is none.

    Raises:
        SettingsError: there is no database.
    """
    if create:
        settings.data.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database_url if create else database_of(settings))
    return connect(settings.database_url)


def database_of(settings: Settings) -> str:
    """Return the database's URL.

    Raises:
        SettingsError: there is no database.
    """
    if not has_database(settings):
        raise SettingsError(f"there is no database in {settings.data}; start the stack with `whetstone up` first")
    return settings.database_url


def has_database(settings: Settings) -> bool:
    """Return whether a stack was started here, or the settings name a database."""
    return settings.database is not None or (settings.data / "whetstone.db").exists()


@contextmanager
def database(settings: Settings, *, create: bool = False) -> Iterator[Engine]:
    """Yield the engine of `engine_of`, and close its connections at the end."""
    engine = engine_of(settings, create=create)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def until_enough() -> Iterator[None]:
    """Treat a closed pipe (| head) as success."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python must not report its unwritten output as lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """Print a value as JSON, on one line."""
    typer.echo(msgspec.json.encode(value).decode())


def show(value: Any, render: Callable[[], RenderableType], *, as_json: bool) -> None:
    """Print a value, as JSON or as `render` shows it to people."""
    if as_json:
        print_json(value)
    else:
        # A whole table may be wider than the screen, and is never cut.
        console.print(render(), crop=False)


def report(value: Any, *lines: str, as_json: bool) -> None:
    """Print what was done, as JSON or in words, a line each."""
    if as_json:
        print_json(value)
        return
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)


def message_of(error: Exception) -> str | None:
    """Return the message of an error that a user can fix; None of any other."""
    if isinstance(error, WhetstoneError | MigrationError):
        return str(error)
    if isinstance(error, DBAPIError):
        return f"the database does not answer: {str(error.orig).strip()}"
    # A number, text or URL that no database or terminal can process.
    return ascii(str(error)) if isinstance(error, ArgumentError | UnicodeEncodeError | OverflowError) else None


def check(wrong: Mapping[str, bool]) -> None:
    """Refuse options that do not go together, with the message of the first rule that is broken."""
    if broken := [message for message, is_wrong in wrong.items() if is_wrong]:
        raise typer.BadParameter(broken[0])


def fail(message: str, code: int = 1) -> NoReturn:
    """Print what went wrong, and exit."""
    errors.print(f"[red]whetstone:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)
