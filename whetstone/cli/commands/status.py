"""`whetstone status`: show what runs, its state, and problems with their remedies."""

from datetime import UTC, datetime

import typer

from whetstone.cli.options import ConfigOption, DataOption, JsonObjectOption, database_of, running_settings, show
from whetstone.cli.tables.status_report import examine, shown


def status(as_json: JsonObjectOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the state of the stack: processes, proxy, vLLM servers, journal, policies, groups, and any problems.

    Exit code 0 if there is no problem, 1 if there is one, 2 if there is nothing to look at.

    Example:

        whetstone status --json | jq '.problems'
    """
    settings = running_settings(data, config)
    database_of(settings)
    now = datetime.now(UTC)
    facts = examine(settings, now)
    show(facts, lambda: shown(facts, now), as_json=as_json)
    raise typer.Exit(1 if facts["problems"] else 0)
