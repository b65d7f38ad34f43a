"""`whetstone policies`: list policies, and turn training on or off."""

from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    JsonOption,
    ListsByDefault,
    PolicyArgument,
    WideOption,
    report,
    running_settings,
    show,
    store_of,
)
from whetstone.config.settings import Settings, load
from whetstone.registry.projects import Store
from whetstone.terminal.listing import Listing

policies = typer.Typer(
    cls=ListsByDefault,
    help="""What learns and what only records.

    Without a command, it lists them.

    Examples:

        whetstone policies
        whetstone policies train on
    """,
)


@policies.command("list")
def list_policies(
    wide: WideOption = False, as_json: JsonOption = False, data: DataOption = None, config: ConfigOption = None
) -> None:
    """Show the policies, their live versions and whether they train. JSON uses the names of `admin_policies`.

    Example:

        whetstone policies list
    """
    settings = running_settings(data, config)
    store = store_of(settings)
    rows = [_facts(row) for own in settings.of_projects() for row in store.policies(own.project)]
    show(rows, lambda: _table(settings, store, wide=wide), as_json=as_json)


def _table(settings: Settings, store: Store, *, wide: bool) -> RenderableType:
    table = Table("project", "policy", "other names", "base model", "answered by", "live", "candidate", "state")
    for own in settings.of_projects():
        tested = store.tested(own.project)
        for row in store.policies(own.project):
            table.add_row(
                own.project, row["id"], ", ".join(row["aliases"] or ()), row["base_model"], row["upstream"] or "vLLM",
                f"v{row['live_version']}", tested.get(row["id"], ""), row["state"],
            )  # fmt: skip
    optional = ("project", "other names", "base model", "answered by")
    return Listing(table, ids=("policy", "base model"), optional=optional, wide=wide)


@policies.command("train")
def train_policy(
    switch: Annotated[str, typer.Argument(help="on, or off: it then only records")],
    policy: PolicyArgument = None,
    as_json: JsonObjectOption = False,
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
    name = policy or settings.policy
    store_of(settings).set_policy_state(settings.project, name, state)
    report({"policy": name, "state": state}, f"{name} is {state}", as_json=as_json)


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    names = ("project", "base_model", "live_version", "state", "model_path", "created_at", "upstream", "aliases")
    return {"policy": row["id"], **{name: row[name] for name in names}}
