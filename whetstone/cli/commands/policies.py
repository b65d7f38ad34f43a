"""`whetstone policies`: list policies, and turn training on or off."""

from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Connection

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    JsonOption,
    ListsByDefault,
    PolicyArgument,
    WideOption,
    database,
    report,
    running_settings,
    show,
    store_of,
)
from whetstone.config.settings import Settings, load
from whetstone.registry.handover import read_handover, read_last_decision, read_saved
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


@policies.command("handover")
def show_handovers(
    wide: WideOption = False, as_json: JsonOption = False, data: DataOption = None, config: ConfigOption = None
) -> None:
    """Show the policies that take over from a model of another server: which share of the requests each answers itself,
    why, and what that has saved.

    Example:

        whetstone policies handover
    """
    settings = running_settings(data, config)
    with database(settings) as engine, engine.connect() as connection:
        rows = [
            row
            for own in settings.of_projects()
            for policy in own.trained
            if (row := _handover(connection, own, policy)) is not None
        ]
    show(rows, lambda: _handovers(rows, wide=wide), as_json=as_json)


def _handover(connection: Connection, settings: Settings, policy: str) -> dict[str, Any] | None:
    """Return the facts of a policy's handover; None without one."""
    learning = settings.learning_of(policy).handover
    state = read_handover(connection, settings.project, policy)
    if learning is None or state is None:
        return None
    last = read_last_decision(connection, settings.project, policy)
    prices = settings.upstream_prices.get((settings.project, learning.teacher))
    saved = read_saved(connection, settings.project, policy, prices)
    return {
        "project": settings.project,
        "policy": policy,
        "teacher": state.teacher,
        "share": state.share,
        "since": state.since,
        "decision": last and last.decision,
        "reason": last and last.reason,
        "answers": saved.answers,
        "prompt_tokens": saved.prompt_tokens,
        "completion_tokens": saved.completion_tokens,
        "saved_usd": saved.usd,
    }


def _handovers(rows: list[dict[str, Any]], *, wide: bool) -> RenderableType:
    if not rows:
        return escape("no policy takes over from a teacher: [learning.<policy>.handover] begins it (docs/handover.md)")
    table = Table("policy", "teacher", "share", "answers", "tokens", "saved", "why")
    for row in rows:
        tokens = row["prompt_tokens"] + row["completion_tokens"]
        saved = "no prices" if row["saved_usd"] is None else f"${row['saved_usd']:,.2f}"
        table.add_row(
            row["policy"], row["teacher"], f"{row['share']:.0%}", f"{row['answers']:,}", f"{tokens:,}", saved,
            row["reason"] or "",
        )  # fmt: skip
    return Listing(table, ids=("policy", "teacher"), optional=("tokens",), wide=wide)


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    names = ("project", "base_model", "live_version", "state", "model_path", "created_at", "upstream", "aliases")
    return {"policy": row["id"], **{name: row[name] for name in names}}
