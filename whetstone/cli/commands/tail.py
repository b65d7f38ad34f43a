"""`whetstone tail`: calls as they are recorded, a line each."""

import select
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from sqlalchemy import Connection

from migrations.run import upgrade
from whetstone.calls import store as call_store
from whetstone.calls.store import Filter
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    PolicyOption,
    ProjectOption,
    console,
    database_of,
    print_json,
    running_settings,
    until_enough,
)
from whetstone.cli.tables import call_lines
from whetstone.database.engine import snapshots

POLL_S = 1.0
SHORT = timedelta(seconds=20)
"""How far back each look at the database reaches, by the time at which a call arrived. It is recorded when it ends."""
LONG, LONG_EVERY = timedelta(minutes=15), 15
"""How far back every fifteenth look reaches, for calls that took LONG_MS at least."""
LONG_MS = 15_000.0
"""SHORT without the time that it takes to record a call."""


def tail(
    policy: PolicyOption = None,
    state: Annotated[
        Literal["complete", "aborted", "error"] | None, typer.Option("--state", help="Only calls that ended so")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only calls with this label")] = None,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="Only calls that this version answered")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only calls with the API key of this id")] = None,
    least_s: Annotated[
        float | None, typer.Option("--min-seconds", min=0, help="Only calls that took at least so long")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Begin with the last calls, so many")] = 10,
    project: ProjectOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object on each line")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Print calls as they are recorded, a line each, until Ctrl-C: of all policies of the project, or as filtered.

    A line has the time (UTC), the version, how the call ended, tokens read and sampled, seconds to the first token (of
    streams) and to the last, and the first words of the prompt. The database is read once a second, and never written.
    JSON uses the names of `admin_completions`, with `task` and `split` of the trajectory, and `prompt`. The dashboard
    follows calls at `/ui/live`, with the same filters.

    Examples:

        whetstone tail --policy starter --state error
        whetstone tail --json | jq '.total_ms'
    """
    settings = running_settings(data, config)
    own = settings.of_project(project) if project else settings.of_policy(policy)
    url = database_of(settings)
    upgrade(url)
    wanted = Filter(own.project, policy, state, task, version, key, None if least_s is None else 1000 * least_s)
    width = console.width if console.is_terminal else None

    def show(rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            if as_json:
                print_json(row)
            else:
                typer.echo(call_lines.line(row, width))
        sys.stdout.flush()

    try:
        with until_enough(), snapshots(url) as snapshot:
            follower = Follower(snapshot, wanted)
            if width is not None and not as_json:
                typer.echo(call_lines.head(width))
            show(follower.begin(lines, datetime.now(UTC)))
            while not _is_closed():
                time.sleep(POLL_S)
                show(follower.new(datetime.now(UTC)))
    except KeyboardInterrupt:
        return


class Follower:
    """Calls that match a filter, each returned once, soon after it is recorded."""

    def __init__(self, snapshot: Callable[[], AbstractContextManager[Connection]], wanted: Filter) -> None:
        self._snapshot, self._wanted = snapshot, wanted
        self._short: set[str] = set()
        """Calls that the last look listed."""
        self._long: set[str] = set()
        """Long calls that the last long look listed, and all calls that were returned since."""
        self._looks = 0

    def begin(self, lines: int, now: datetime) -> list[dict[str, Any]]:
        """Return the last calls, so many; from then on, only newer calls are returned."""
        with self._snapshot() as connection:
            self._short = call_store.ids_since(connection, self._wanted, now - SHORT)
            self._long = call_store.ids_since(connection, self._wanted, now - LONG, LONG_MS)
            return call_store.newest(connection, self._wanted, lines)

    def new(self, now: datetime) -> list[dict[str, Any]]:
        """Return the calls that were recorded since the last look."""
        self._looks += 1
        is_long = self._looks % LONG_EVERY == 0
        with self._snapshot() as connection:
            short = call_store.ids_since(connection, self._wanted, now - SHORT)
            long = call_store.ids_since(connection, self._wanted, now - LONG, LONG_MS) if is_long else set()
            new = (short | long) - self._short - self._long
            rows = call_store.calls(connection, self._wanted.project, new)
        self._short, self._long = short, (long if is_long else self._long) | new
        return rows


def _is_closed() -> bool:
    """Return whether the reader of a pipe has gone, even while there is nothing to write."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))
