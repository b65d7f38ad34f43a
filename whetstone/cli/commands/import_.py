"""`whetstone import`: options, output and exit codes. The work is done by `transfer.importing`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from migrations.run import upgrade
from whetstone.cli.options import ConfigOption, DataOption, errors, policy_names
from whetstone.config.proxy import POLICY_NAME
from whetstone.config.settings import Settings, load
from whetstone.database.engine import connect
from whetstone.doctor.vllm_checks import of_running
from whetstone.transfer.importing.importer import Outcome, Wanted, check, run

DEFAULT_POLICY = "imported"


def import_log(
    file: Annotated[Path, typer.Argument(help="JSON lines: conversations, or requests with their responses")],
    policy: Annotated[
        str,
        typer.Option("--policy", help="What they are kept under: no policy that answers", autocompletion=policy_names),
    ] = DEFAULT_POLICY,
    reward_field: Annotated[
        str, typer.Option("--reward-field", help="Field of a line with its reward; dots lead into objects")
    ] = "reward",
    task: Annotated[str | None, typer.Option("--task", help="Label of those that have none")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose they are [the home project's]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check and count; nothing is written")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Import a log in OpenAI's format: its conversations become trajectories for supervised steps and exports.

    A line is {"messages": [..., the assistant's]}, as in fine-tuning files, or {"request": {...}, "response": {...}},
    as gateways log calls. The sampled tokens are unknown, so no policy-gradient step ever uses them. All lines are
    checked before any is written, and importing the same file again adds nothing. docs/export.md has the details.

    Exit code 0 if everything is imported, 2 if a line cannot be imported (then nothing is written).

    Examples:

        whetstone import chats.jsonl --policy teacher --reward-field score
        whetstone step --imitate teacher --min-reward 0.5
    """
    settings = of_running(load(config, data=data))
    own = settings.of_project(project or settings.home)
    _check_policy(settings, policy)
    normalise = (own.proxy.normalise, own.proxy.normalise_timeout_s)
    wanted = Wanted(file, own.project, policy, reward_field, task, own.privacy.no_train, *normalise)
    with errors.status("checking") as status:
        found = check(wanted, lambda count: status.update(f"checked {count:,} lines"))
    if reward_field != "reward" and not found.rewarded:
        raise typer.BadParameter(f"no line has a {reward_field!r}", param_hint="--reward-field")
    if not dry_run:
        _write(settings, wanted, found)
    if as_json:
        typer.echo(msgspec.json.encode(_facts(found, wanted, dry_run=dry_run)).decode())
    else:
        _tell(found, wanted, dry_run=dry_run)


def _check_policy(settings: Settings, policy: str) -> None:
    if not POLICY_NAME.fullmatch(policy):
        raise typer.BadParameter("a policy's name has 1 to 64 of a-z 0-9 . _ -", param_hint="--policy")
    served = {*settings.all_trained, *(name for one in settings.upstreams.values() for name in one.models)}
    if policy in served:
        raise typer.BadParameter(
            f"{policy} answers apps: what others said would be counted as its own; name another, and "
            f"`whetstone step {policy} --imitate NAME` learns from it",
            param_hint="--policy",
        )


def _write(settings: Settings, wanted: Wanted, found: Outcome) -> None:
    settings.data.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    try:
        with errors.status("writing") as status:
            run(engine, wanted, found, lambda line: status.update(f"wrote {line:,} lines"))
    finally:
        engine.dispose()


def _facts(found: Outcome, wanted: Wanted, *, dry_run: bool) -> dict[str, Any]:
    names = ("trajectories", "completions", "there", "taken", "erased")
    told = {"file": str(wanted.file), "policy": wanted.policy, "lines": found.lines, "rewarded": found.rewarded}
    told |= {"conversations": found.conversations, "unanswered": found.unanswered, "dry_run": dry_run}
    return told | {name: found.counted[name] for name in names}


def _tell(found: Outcome, wanted: Wanted, *, dry_run: bool) -> None:
    out = Console()
    counted = found.counted
    if dry_run:
        said = f"{found.lines:,} lines, all can be imported: {found.conversations:,} answered conversations"
    else:
        said = f"{counted['trajectories']:,} trajectories with {counted['completions']:,} completions are kept under "
        said += f"the policy {wanted.policy}"
    out.print(escape(f"{said}; {found.rewarded:,} lines have a reward"), highlight=False, soft_wrap=True)
    notes = {
        "were there already": counted["there"],
        "have the id of a trajectory that an app made: left out": counted["taken"],
        "were to be deleted (docs/privacy.md): left out": counted["erased"],
        "calls have no answer: left out": found.unanswered,
    }
    for what, count in notes.items():
        if count:
            out.print(f"  {count:,} {what}", style="dim", highlight=False, soft_wrap=True)
