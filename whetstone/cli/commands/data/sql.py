"""`whetstone sql` and `whetstone sql-role`: query the database, and create roles that may query it."""

import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from sqlalchemy import Connection, make_url
from sqlalchemy.exc import DBAPIError

from migrations import readers
from migrations.views import BY_NAME, VIEWS, View
from whetstone.cli.options import ConfigOption, DataOption, console, database, database_of, errors, fail, until_enough
from whetstone.cli.tables import table_formats
from whetstone.cli.tables.sql_query import QueryFailed, asking
from whetstone.config.settings import load
from whetstone.database.engine import snapshot
from whetstone.terminal.fitting import Fitting

ROWS_OF_TABLE = 1000
"""A table is built in memory, and a longer one is not readable."""


def sql(
    query: Annotated[
        str | None,
        typer.Argument(help='"SELECT * FROM admin_steps"; a view\'s name alone lists its columns; - reads stdin'),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the query from a file")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help='CSV with a head; nothing is NULL, "" the empty text')] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON: one array of objects")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="JSON: an object on each line")] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help=f"Most rows [{ROWS_OF_TABLE} of a table, else all]")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="Seconds the database may work; 0: any time [sql.timeout_s]"),
    ] = None,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Query the database, read-only, through the views admin_*. Without a query, list the views.

    A table fits the screen and cuts long cells. CSV and JSON cut nothing, and are written row by row, for any number of
    rows. docs/sql.md has two dozen example queries, docs/views.md every column.

    Exit code 0, or 2 if the query fails: the message says why, and which name may be meant.

    Examples:

        whetstone sql "SELECT step, version_out, reward_mean, seconds FROM admin_steps"
        whetstone sql admin_trajectories
        whetstone sql --csv -f query.sql > answer.csv
    """
    by_flag = (
        (as_csv, table_formats.csv_lines), (as_json, table_formats.json_array), (as_jsonl, table_formats.json_lines),
    )  # fmt: skip
    formats = [lines for is_chosen, lines in by_flag if is_chosen]
    if len(formats) > 1:
        raise typer.BadParameter("choose one of --csv, --json and --jsonl")
    statement = _query(query, file)
    if statement is None or statement in BY_NAME:
        with until_enough():
            _print_views(None if statement is None else BY_NAME[statement], as_json=as_json or as_jsonl)
        return
    limit = limit and min(limit, sys.maxsize)  # islice takes no larger one
    settings = load(config, data=data)
    given_s = settings.sql.timeout_s if timeout_s is None else timeout_s
    with until_enough(), asking(database_of(settings), statement, given_s or None) as (columns, rows):
        if formats:
            sys.stdout.writelines(formats[0](columns, islice(rows, limit)))
        else:
            _show(columns, rows, limit or ROWS_OF_TABLE)


def _print(*lines: RenderableType, on: Console = console) -> None:
    # Written by us: rich itself would end the program when the pipe is closed.
    with on.capture() as captured:
        on.print(*lines, sep="\n", highlight=False)
    sys.stdout.write(captured.get())


def _query(query: str | None, file: Path | None) -> str | None:
    """Return the query; None if there is none."""
    if file is not None:
        if query is not None:
            raise typer.BadParameter("give a query or --file, not both")
        return _read(file, "--file").strip()
    if query == "-" or (query is None and _is_piped()):
        return sys.stdin.read().strip() or None
    return None if query is None else query.strip()


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint=option) from error


def _is_piped() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _show(columns: Sequence[str], answer: Iterator[Sequence[Any]], limit: int) -> None:
    rows = list(islice(answer, limit))
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    if next(answer, None) is not None:
        count = f"the first {len(rows)} rows; --limit gives more, --csv and --json all"
    wide = console if console.is_terminal else Console(width=100_000)
    _print(table_formats.table(columns, rows, console.width if console.is_terminal else None), on=wide)
    errors.print(count, style="dim", highlight=False)


def _print_views(view: View | None, *, as_json: bool) -> None:
    if as_json:
        rows = [(one.name, one.purpose, _columns(one)) for one in (VIEWS if view is None else (view,))]
        sys.stdout.writelines(table_formats.json_array(("view", "purpose", "columns"), rows))
    elif view is None:
        names = (Column("view", no_wrap=True, style="bold"), Column("what it is for", overflow="fold"))
        more = '\nwhetstone sql admin_steps lists its columns; whetstone sql "SELECT …" asks; docs/sql.md has queries'
        _print(_bare_table(names, [(one.name, one.purpose) for one in VIEWS]), more)
    else:
        heads = (Column(name, no_wrap=True) for name in ("column", "on SQLite", "on PostgreSQL"))
        meanings = [(column.name, *column.kind.value, column.meaning) for column in view.columns]
        columns = [*heads, Column("meaning", overflow="fold")]
        _print(f"[bold]{view.name}[/bold]: {escape(view.purpose)}\n", _bare_table(columns, meanings))


def _bare_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Fitting:
    table = Table(*columns, show_edge=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    return Fitting(table)


def _columns(view: View) -> list[dict[str, str]]:
    return [
        {"name": one.name, "sqlite": one.kind.value[0], "postgresql": one.kind.value[1], "meaning": one.meaning}
        for one in view.columns
    ]


def sql_role(
    name: Annotated[str, typer.Argument(help="The role: a to z, 0 to 9 and _, for example analyst")],
    password_file: Annotated[
        Path | None, typer.Option("--password-file", help="Its password, the file's first line [a new one, printed]")
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Take the role away")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Only print the SQL, for a role that may create roles; change nothing")
    ] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a read-only PostgreSQL role that can read the admin views, and nothing else: for BI tools and for people.

    The role's URL is printed once to stdout, with its password. The role can read every project, but no hash of a key.
    Run again, the command sets a new password and adds the views that are new since. Migrations preserve what a role
    can read.

    Exit code 0 done, 1 if the database refused, 2 if it could not begin.

    Example:

        whetstone sql-role analyst
    """
    settings = load(config, data=data)
    url = database_of(settings)
    if make_url(url).get_backend_name() != "postgresql":
        raise QueryFailed(
            "SQLite has no roles: every user who can read the file can read all of it. Roles need PostgreSQL"
        )
    if not readers.NAME.fullmatch(name):
        raise typer.BadParameter("a role's name has 1 to 63 of a-z, 0-9 and _, a letter first", param_hint="NAME")
    if show:
        with snapshot(url) as connection:
            for statement in readers.statements(connection, name, "<password>", settings.sql.timeout_s, exists=False):
                typer.echo(f"{statement};")
        return
    password = secrets.token_urlsafe(24) if password_file is None else _password(password_file)
    try:
        with database(settings) as engine, engine.begin() as connection:
            if drop:
                readers.drop(connection, name)
            else:
                _make(connection, name, password, settings.sql.timeout_s)
    except readers.RoleRefused as error:
        fail(str(error))
    except DBAPIError as error:
        fail(
            f"{error.orig}; a role that may create roles can do it: `whetstone sql-role {name} --print` prints the SQL"
        )
    if drop:
        errors.print(f"the role {name} is gone")
    elif password_file is None:
        typer.echo(make_url(url).set(username=name, password=password, drivername="postgresql").render_as_string(False))


def _make(connection: Connection, name: str, password: str, timeout_s: float | None) -> None:
    own: Any = connection.connection.dbapi_connection
    # Hashed here, because a server may log what it receives.
    hashed = own.pgconn.encrypt_password(password.encode(), name.encode(), b"scram-sha-256").decode()
    new = readers.make(connection, name, hashed, timeout_s)
    errors.print(f"the role {name} {'reads' if new else 'has a new password, and reads'} {len(VIEWS)} views")
    for more in readers.sees_too_much(connection, name):
        errors.print(f"[yellow]this server lets everybody[/yellow] {escape(more)}", highlight=False)


def _password(file: Path) -> str:
    password = _read(file, "--password-file").partition("\n")[0].strip()
    if not password:
        raise typer.BadParameter(f"{file} has no password in its first line", param_hint="--password-file")
    return password
