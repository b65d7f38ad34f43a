"""`whetstone policies`: list policies, and turn training on or off."""

from typing import Annotated, Any

import typer
from rich.table import Table

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    ListsByDefault,
    PolicyArgument,
    console,
    print_json,
    running_settings,
    store_of,
)
from whetstone.config.settings import load
from whetstone.terminal.fitting import Fitting

policies = typer.Typer(cls=ListsByDefault, help="What learns and what only records. Without a command: list them.")


@policies.command("list")
def list_policies(as_json: JsonOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the policies, their live versions and whether they train. JSON uses the names of `admin_policies`.

    Example:

        whetstone policies list
    """
    settings = running_settings(data, config)
    store = store_of(settings)
    if as_json:
        print_json([_facts(row) for own in settings.of_projects() for row in store.policies(own.project)])
        return
    table = Table("project", "policy", "other names", "base model", "answered by", "live version", "in test", "state")
    for own in settings.of_projects():
        tested = store.tested(own.project)
        for row in store.policies(own.project):
            table.add_row(
                own.project, row["id"], ", ".join(row["aliases"] or ()), row["base_model"], row["upstream"] or "vLLM",
                str(row["live_version"]), tested.get(row["id"], ""), row["state"],
            )  # fmt: skip
    console.print(Fitting(table))


@policies.command("train")
def train_policy(
    switch: Annotated[str, typer.Argument(help="on, or off: it then only records")],
    policy: PolicyArgument = None,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Turn a policy's training on, or off: then it only records.

    Example:

        whetstone policies train on
    """
    if switch not in ("on", "off"):
        raise typer.BadParameter("say on or off")
    settings = load(config, data=data).of_policy(policy)
    state = "training" if switch == "on" else "recording"
    store_of(settings).set_policy_state(settings.project, policy or settings.policy, state)
    console.print(f"{policy or settings.policy} is {state}")


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    names = ("project", "base_model", "live_version", "state", "model_path", "created_at", "upstream", "aliases")
    return {"policy": row["id"], **{name: row[name] for name in names}}
