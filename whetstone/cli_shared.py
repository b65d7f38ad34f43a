"""What every command of the command line needs: its options, where it speaks, its database. Knows no command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Engine

from migrations.database import connect
from migrations.run import upgrade
from whetstone.admin import NotDone
from whetstone.look import NotThere
from whetstone.settings import Settings, SettingsError, load
from whetstone.store import Store
from whetstone.store_versions import LedgerError

console = Console()
errors = Console(stderr=True)

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of database, adapters and logs [data]")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file [whetstone.toml, if it is there]")]


def policy_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The policies that the settings name, for the shell to complete. Says nothing where those cannot be read."""
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
    """The tables, brought to this version's schema.

    Raises:
        SettingsError: there is no database.
    """
    return Store(engine_of(settings))


def engine_of(settings: Settings) -> Engine:
    """The database, brought to this version's schema.

    Raises:
        SettingsError: there is none.
    """
    upgrade(database_of(settings))
    return connect(settings.database_url)


def database_of(settings: Settings) -> str:
    """The database's URL.

    Raises:
        SettingsError: there is none.
    """
    if not has_database(settings):
        raise SettingsError(f"there is no database in {settings.data}; start the stack with `whetstone up` first")
    return settings.database_url


def has_database(settings: Settings) -> bool:
    """Whether a stack was started here, or the settings name a database."""
    return settings.database is not None or (settings.data / "whetstone.db").exists()


def told_json(told: Any) -> None:
    """Print it as JSON, on one line."""
    typer.echo(msgspec.json.encode(told).decode())


@contextmanager
def refusals() -> Iterator[None]:
    """What is refused is said, and the exit code is 1."""
    try:
        yield
    except (NotDone, NotThere, LedgerError) as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
