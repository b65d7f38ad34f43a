"""`whetstone keys`: manage API keys. The table is `registry.api_key_store`'s."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    JsonOption,
    ListsByDefault,
    WideOption,
    database,
    errors,
    fail,
    print_json,
    report,
    running_settings,
    show,
)
from whetstone.domain.api_keys import (
    MOST_PER_MIN,
    NAME,
    SCOPES,
    hash_of,
    id_of,
    new_key,
    read_lifetime,
    read_scopes,
)
from whetstone.registry import api_key_store
from whetstone.terminal.listing import Listing

keys = typer.Typer(
    cls=ListsByDefault,
    help="""Manage API keys: for apps and for people, each with its scopes.

    Without a command, it lists them.

    Examples:

        whetstone keys
        whetstone keys create --name app --scope inference --scope feedback
    """,
)


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Option("--name", help="What it is for, in words")],
    scope: Annotated[
        list[str], typer.Option("--scope", help=f"What it opens, once for each: {', '.join(SCOPES)} (has them all)")
    ],
    project: Annotated[str | None, typer.Option("--project", help="The tenant it leads to [the home project]")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="How long it lives: 12h, 90d, 2w [for good]")] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=1, max=MOST_PER_MIN, help="Most requests [no limit]")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option("--tokens-per-minute", min=1, max=MOST_PER_MIN, help="Most tokens, read and sampled [no limit]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object, which has the key as `key`")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a key and print it once: only its hash is stored.

    Only the key goes to stdout (KEY=$(whetstone keys create …)), the rest to stderr. A running proxy accepts it at
    once. From the first key on, every request needs one, on loopback too.

    Example:

        KEY=$(whetstone keys create --name app --scope inference --scope feedback --expires 90d)
    """
    settings = running_settings(data, config)
    own = settings.of_project(project or settings.home)
    if not re.fullmatch(NAME, name):
        raise typer.BadParameter(
            "a name has 1 to 100 characters, none of them a control character", param_hint="--name"
        )
    now = datetime.now(UTC)
    try:
        scopes = read_scopes(scope)
        expires_at = None if expires is None else now + read_lifetime(expires)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    key_id, key = new_key()
    made = api_key_store.KeyRecord(own.project, name, scopes, now, expires_at, requests_per_minute, tokens_per_minute)
    # Off loopback, a stack cannot start before its first key.
    with database(settings, create=True) as engine, engine.begin() as connection:
        first = api_key_store.state(connection)[0] == 0
        api_key_store.create(connection, made, key_id, hash_of(key.encode()))
    if as_json:
        print_json({"key_id": key_id, "key": key, **asdict(made)})
    else:
        typer.echo(key)
    until = "until it is revoked" if expires_at is None else f"until {_minute(expires_at)} UTC"
    _say(f"key {key_id} of project {own.project} opens {', '.join(scopes)}, {until}; it is not shown again")
    if first:
        _say("it is the first: from now on every request needs a key (docs/keys.md)")


@keys.command("list")
def list_keys(
    project: Annotated[str | None, typer.Option("--project", help="Only this tenant's [all]")] = None,
    wide: WideOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List all keys, the newest first, with scopes, expiry and last use.

    Example:

        whetstone keys list
    """
    settings = running_settings(data, config)
    named = project and settings.of_project(project).project
    with database(settings) as engine, engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        rows = api_key_store.keys(connection, named)
    show(rows, lambda: _table(rows, wide=wide), as_json=as_json)


def _table(rows: Sequence[dict[str, Any]], *, wide: bool) -> RenderableType:
    table = Table("key", "project", "name", "opens", "a minute", "made", "last used", "state")
    now = datetime.now(UTC)
    for row in rows:
        table.add_row(
            row["key_id"], row["project"], escape(row["name"]), ", ".join(row["scopes"]), _quota(row),
            _day(row["created_at"]), _minute(row["last_used_at"]), _state(row, now),
        )  # fmt: skip
    optional = ("project", "made", "a minute", "last used")
    return Listing(table, optional=optional, wide=wide)


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(metavar="ID", help="Its id, as `whetstone keys list` shows it")],
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a key for good. A running proxy refuses it at once.

    Exit code 0 if the key is no longer valid, 1 if there is no such key.

    Example:

        whetstone keys revoke k3xq0a7b2c9d
    """
    key_id = id_of(key)
    with database(running_settings(data, config)) as engine, engine.begin() as connection:
        if not api_key_store.revoke(connection, key_id, datetime.now(UTC)):
            fail(f"there is no key {key_id!r}; `whetstone keys list` shows them")
    report({"key_id": key_id, "revoked": True}, f"key {key_id} is revoked", as_json=as_json)


def _say(text: str) -> None:
    errors.print(escape(text), highlight=False, soft_wrap=True)


def _state(row: dict[str, Any], now: datetime) -> str:
    if row["revoked_at"] is not None:
        return f"revoked {_day(row['revoked_at'])}"
    if row["expires_at"] is None:
        return "open"
    return f"open until {_minute(row['expires_at'])}" if row["expires_at"] > now else f"over {_day(row['expires_at'])}"


def _quota(row: dict[str, Any]) -> str:
    limits = {"requests": row["requests_per_min"], "tokens": row["tokens_per_min"]}
    return ", ".join(f"{limit} {what}" for what, limit in limits.items() if limit is not None)


def _day(time: datetime) -> str:
    return f"{time:%Y-%m-%d}"


def _minute(time: datetime | None) -> str:
    return "" if time is None else f"{time:%Y-%m-%d %H:%M}"
