"""`whetstone import`: options, output and exit codes. The work is done by `transfer.importing`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    console,
    database,
    errors,
    policy_names,
    print_json,
    running_settings,
)
from whetstone.config.proxy import POLICY_NAME
from whetstone.config.settings import Settings
from whetstone.transfer.importing.importer import ImportOptions, Outcome, check, run


def import_log(
    file: Annotated[Path, typer.Argument(help="JSON lines: conversations, or requests with their responses")],
    policy: Annotated[
        str,
        typer.Option(
            "--policy", help="Policy to store them under; it must not answer calls", autocompletion=policy_names
        ),
    ] = "imported",
    reward_field: Annotated[
        str, typer.Option("--reward-field", help="Field of a line with its reward; dots lead into objects")
    ] = "reward",
    task: Annotated[str | None, typer.Option("--task", help="Label of those that have none")] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose they are [the home project's]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check and count; nothing is written")] = False,
    as_json: JsonObjectOption = False,
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
    settings = running_settings(data, config)
    own = settings.of_project(project or settings.home)
    _check_policy(settings, policy)
    options = ImportOptions(
        file, own.project, policy, reward_field, task, own.privacy.no_train, own.proxy.normalise,
        own.proxy.normalise_timeout_s,
    )  # fmt: skip
    with errors.status("checking") as status:
        outcome = check(options, lambda count: status.update(f"checked {count:,} lines"))
    if reward_field != "reward" and not outcome.rewarded:
        raise typer.BadParameter(f"no line has a {reward_field!r}", param_hint="--reward-field")
    if not dry_run:
        with database(settings, create=True) as engine, errors.status("writing") as status:
            run(engine, options, outcome, lambda line: status.update(f"wrote {line:,} lines"))
    if as_json:
        print_json(
            {
                "file": str(file),
                "policy": policy,
                "lines": outcome.lines,
                "rewarded": outcome.rewarded,
                "conversations": outcome.conversations,
                "unanswered": outcome.unanswered,
                "dry_run": dry_run,
                **{name: outcome.counted[name] for name in ("trajectories", "completions", "there", "taken", "erased")},
            }
        )
    else:
        _print_summary(outcome, options, dry_run=dry_run)


def _check_policy(settings: Settings, policy: str) -> None:
    if not POLICY_NAME.fullmatch(policy):
        raise typer.BadParameter("a policy's name has 1 to 64 of a-z 0-9 . _ -", param_hint="--policy")
    served = {*settings.all_trained, *(name for one in settings.upstreams.values() for name in one.models)}
    if policy in served:
        raise typer.BadParameter(
            f"{policy} answers apps: imported answers would be counted as its own; name another, and "
            f"`whetstone step {policy} --imitate NAME` learns from it",
            param_hint="--policy",
        )


def _print_summary(outcome: Outcome, options: ImportOptions, *, dry_run: bool) -> None:
    counted = outcome.counted
    if dry_run:
        summary = f"{outcome.lines:,} lines, all can be imported: {outcome.conversations:,} answered conversations"
    else:
        summary = f"{counted['trajectories']:,} trajectories with {counted['completions']:,} completions are stored "
        summary += f"under the policy {options.policy}"
    console.print(escape(f"{summary}; {outcome.rewarded:,} lines have a reward"), highlight=False, soft_wrap=True)
    notes = {
        "were there already": counted["there"],
        "have the id of a trajectory that an app made: left out": counted["taken"],
        "were to be deleted (docs/privacy.md): left out": counted["erased"],
        "calls have no answer: left out": outcome.unanswered,
    }
    for what, count in notes.items():
        if count:
            console.print(f"  {count:,} {what}", style="dim", highlight=False, soft_wrap=True)
