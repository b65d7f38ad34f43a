"""`whetstone status`: what runs, how it stands, what is wrong and what to do. Words and exit codes."""

from datetime import UTC, datetime

import typer

from whetstone.cli_shared import ConfigOption, DataOption, JsonObjectOption, console, database_of, told_json
from whetstone.doctor import of_running
from whetstone.settings import load
from whetstone.status import examine, shown


def status(as_json: JsonObjectOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show what runs and how it stands: processes, proxy, vLLM servers, journal, policies, groups, and what is wrong.

    Exit code 0 if nothing is wrong, 1 if something is, 2 if there is nothing to look at.

    Example:

        whetstone status --json | jq '.problems'
    """
    settings = of_running(load(config, data=data))
    database_of(settings)
    now = datetime.now(UTC)
    facts = examine(settings, now)
    if as_json:
        told_json(facts)
    else:
        console.print(shown(facts, now))
    if facts["problems"]:
        raise typer.Exit(1)
