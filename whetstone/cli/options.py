"""Shared parts of the commands: options, consoles, access to the database."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Engine

from migrations.run import upgrade
from whetstone.cli.tables.trajectory_tables import NotFound
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.registry.adapter_copies import NotCopied
from whetstone.registry.projects import Store
from whetstone.registry.versions import LedgerError
from whetstone.stack.admin_client import RefusedByProxy

console = Console()
errors = Console(stderr=True)

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one array")]
JsonObjectOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object")]


def store_of(settings: Settings) -> Store:
    """Return the tables, migrated to this version's schema.

    Raises:
        SettingsError: there is no database.
    """
    return Store(engine_of(settings))


def engine_of(settings: Settings) -> Engine:
    """Return an engine on the database, migrated to this version's schema.

    Raises:
        SettingsError: there is no database.
    """
    upgrade(database_of(settings))
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


def print_json(value: Any) -> None:
    """Print a value as JSON, on one line."""
    typer.echo(msgspec.json.encode(value).decode())


@contextmanager
def refusals() -> Iterator[None]:
    """Print the message of a refusal, and exit with code 1."""
    try:
        yield
    except (RefusedByProxy, NotCopied, NotFound, LedgerError) as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
