"""`whetstone policies`: what learns and what only records."""

from typing import Annotated

import typer
from rich.table import Table

from whetstone.cli_shared import ConfigOption, DataOption, console, store_of
from whetstone.settings import load

policies = typer.Typer(help="What learns and what only records.", no_args_is_help=True)


@policies.command("list")
def list_policies(data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the policies, their live versions and whether they train."""
    settings = load(config, data=data)
    store = store_of(settings)
    table = Table("project", "policy", "other names", "base model", "answered by", "live version", "in test", "state")
    for own in settings.of_projects():
        tested = store.tested(own.project)
        for row in store.policies(own.project):
            aliases, server, live = ", ".join(row["aliases"] or ()), row["upstream"] or "vLLM", str(row["live_version"])
            said = (row["base_model"], server, live, tested.get(row["id"], ""), row["state"])
            table.add_row(own.project, row["id"], aliases, *said)
    console.print(table)


@policies.command("train")
def train_policy(
    switch: Annotated[str, typer.Argument(help="on, or off: it then only records")],
    policy: Annotated[str | None, typer.Argument(help="Its name [the default policy]")] = None,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Let a policy train, or only record."""
    if switch not in ("on", "off"):
        raise typer.BadParameter("say on or off")
    settings = load(config, data=data).of_policy(policy)
    state = "training" if switch == "on" else "recording"
    store_of(settings).set_policy_state(settings.project, policy or settings.policy, state)
    console.print(f"{policy or settings.policy} is {state}")
