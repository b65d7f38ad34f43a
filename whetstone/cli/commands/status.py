"""`whetstone status`: show what runs, its state, and problems with their remedies."""

from datetime import UTC, datetime

import typer

from whetstone.cli.options import ConfigOption, DataOption, JsonObjectOption, console, database_of, print_json
from whetstone.cli.tables.status_report import examine, shown
from whetstone.config.settings import load
from whetstone.doctor.vllm_checks import of_running


def status(as_json: JsonObjectOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the state of the stack: processes, proxy, vLLM servers, journal, policies, groups, and any problems.

    Exit code 0 if there is no problem, 1 if there is one, 2 if there is nothing to look at.

    Example:

        whetstone status --json | jq '.problems'
    """
    settings = of_running(load(config, data=data))
    database_of(settings)
    now = datetime.now(UTC)
    facts = examine(settings, now)
    if as_json:
        print_json(facts)
    else:
        console.print(shown(facts, now))
    if facts["problems"]:
        raise typer.Exit(1)
