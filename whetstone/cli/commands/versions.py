"""`whetstone versions`: options, output and exit codes."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    JsonOption,
    ListsByDefault,
    PolicyArgument,
    WideOption,
    engine_of,
    policy_names,
    report,
    running_settings,
    show,
)
from whetstone.cli.tables.version_commands import Versions
from whetstone.config.settings import Settings
from whetstone.database.engine import snapshot
from whetstone.doctor import training, training_store
from whetstone.domain.ids import version_id
from whetstone.registry.versions import Move
from whetstone.terminal.listing import Listing

NAMED = re.compile(r"(?P<policy>.+)@v(?P<version>0|[1-9][0-9]{0,8})")
"""Pattern of a version's name, also used by apps."""
NamedPolicy = Annotated[str, typer.Argument(help="Its name", autocompletion=policy_names)]
Reason = Annotated[str | None, typer.Option("--reason", help="Why, for who reads `admin_gate_results` later")]
Named = Annotated[str, typer.Argument(metavar="POLICY@vN", help="The version, as apps name it: starter@v3")]


class _Lists(ListsByDefault):
    """Run `versions starter` as `versions list starter`."""

    def lists(self, word: str) -> bool:
        return word not in self.commands


versions = typer.Typer(
    cls=_Lists,
    help="""A policy's versions: list them, move between them, take adapters out and bring them in.

    Without a command, it lists them.

    Examples:

        whetstone versions
        whetstone versions starter
        whetstone versions rollback
    """,
)


@versions.command("list")
def list_versions(
    policy: PolicyArgument = None,
    wide: WideOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a policy's versions, the newest first: their origin, their test results, and whether they are loaded.

    `from` is the version that it was trained from, or where it was imported from. `k3`: how far vLLM and
    the trainer disagree on the probe's tokens, nats per token. `held out`: mean reward of its held-out calls
    (`X-Split: eval`), and their number; without such calls, of the gate's test `heldout`.

    Example:

        whetstone versions starter
    """
    settings, line = _open(data, config, policy)
    name = policy or settings.policy
    rows = line.rows(name)
    with snapshot(settings.database_url) as connection:
        numbers = [row["version"] for row in rows]
        rewards = training_store.rewards(connection, settings.project, name, numbers)
    show(rows, lambda: _table(name, rows, rewards, wide=wide), as_json=as_json)


@versions.command("promote")
def promote(
    policy: NamedPolicy,
    version: Annotated[int, typer.Argument(min=0, help="Its number; 0 is the base model")],
    reason: Reason = None,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a version live from the next request on, regardless of the gate's decision.

    If a stack runs, the version is loaded first; if a model server cannot load it, nothing changes.

    Exit code 0 if it is live, 1 if it is refused, 2 if a stack runs whose proxy cannot be reached.

    Example:

        whetstone versions promote starter 7
    """
    _, line = _open(data, config, policy)
    move = line.promote(policy, version, reason)
    before = line.before(policy)
    back = [] if before is None else [f"`whetstone versions rollback {policy}` goes back to version {before}"]
    _print_move(policy, move, *back, as_json=as_json)


@versions.command("rollback")
def rollback(
    policy: PolicyArgument = None,
    to: Annotated[
        int | None, typer.Option("--to", min=0, help="A version that the live one descends from [its parent]")
    ] = None,
    reason: Reason = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation (only a terminal is asked)")] = False,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Go back to the version that the live one was trained from, from the next request on.

    The live version and all versions trained from it are rejected, and their answers are no longer trained on.

    Exit code 0 if it was done, 1 if it is refused or not confirmed, 2 if a stack runs whose proxy cannot be reached.

    Example:

        whetstone versions rollback starter
    """
    settings, line = _open(data, config, policy)
    name = policy or settings.policy
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        # The version that is confirmed is the one that is made live, whatever is promoted meanwhile.
        to = line.before(name) if to is None else to
        if to is not None:
            question = f"Make version {to} of {name} live again, and reject the live version and its line back to {to}?"
            typer.confirm(question, abort=True, err=True)
    _print_move(name, line.roll_back(name, to, reason), as_json=as_json)


@versions.command("pin")
def pin(
    policy: NamedPolicy,
    version: Annotated[int, typer.Argument(min=0, help="Its number")],
    off: Annotated[bool, typer.Option("--off", help="No longer")] = False,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Keep a version loaded and on the disk regardless of newer versions, so that apps can request policy@vN.

    Exit code 0 if it was done, 1 if it is refused, 2 if a stack runs whose proxy cannot be reached.

    Example:

        whetstone versions pin starter 7
    """
    _, line = _open(data, config, policy)
    line.pin(policy, version, pinned=not off)
    name = version_id(policy, version)
    words = f"{name} is no longer pinned" if off else f"{name} is pinned"
    report({"policy": policy, "version": version, "pinned": not off}, words, as_json=as_json)


@versions.command("export")
def export(
    named: Named,
    folder: Annotated[Path, typer.Argument(help="Where to write it; new or empty")],
    merged: Annotated[bool, typer.Option("--merged", help="The base model with the adapter in its weights")] = False,
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Write a version in the format of transformers and peft, checked against its manifest, without optimizer state.

    Example:

        whetstone versions export starter@v7 out/
    """
    policy, version = _version(named)
    _, line = _open(data, config, policy)
    line.export(policy, version, folder, merged=merged)
    report({"version": named, "folder": str(folder), "merged": merged}, f"{named} is in {folder}", as_json=as_json)


@versions.command("import")
def import_version(
    folder: Annotated[Path, typer.Argument(help="What peft's save_pretrained wrote, in safetensors")],
    policy: Annotated[
        str, typer.Argument(help="The policy that gets it as its next version", autocompletion=policy_names)
    ],
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Import an adapter that was trained elsewhere as a version of a policy. It is not live until it is promoted.

    It must be a plain LoRA of this base model: its layers and their shapes are compared. A step that continues from it
    begins with a fresh optimizer.

    Example:

        whetstone versions import out/ starter
    """
    _, line = _open(data, config, policy)
    number, imported = line.bring_in(folder, policy)
    why_no_step = imported.why_no_step
    lines = [_number_line(policy, number), *([f"no step can go on from it: {why_no_step}"] if why_no_step else [])]
    report({"policy": policy, "version": number, "why_no_step": why_no_step}, *lines, as_json=as_json)


@versions.command("fork")
def fork(
    named: Named,
    policy: Annotated[str, typer.Argument(help="The policy that gets it: one of `policies` in the settings")],
    as_json: JsonObjectOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Copy a version into another policy, with its optimizer's state, so that this policy can continue from it.

    Example:

        whetstone versions fork starter@v7 second
    """
    source, version = _version(named)
    settings, line = _open(data, config, source)
    if policy not in settings.trained:
        raise typer.BadParameter(
            f"{policy!r} is none of: {', '.join(settings.trained)}; name it in `policies` of the settings first"
        )
    number = line.fork(source, version, policy)
    report({"policy": policy, "version": number, "origin": named}, _number_line(policy, number), as_json=as_json)


def _open(data: Path | None, config: Path | None, policy: str | None) -> tuple[Settings, Versions]:
    """Return the settings of the policy's project, and its versions."""
    settings = running_settings(data, config).of_policy(policy)
    return settings, Versions(settings, engine_of(settings))


def _version(named: str) -> tuple[str, int]:
    match = NAMED.fullmatch(named)
    if match is None:
        raise typer.BadParameter(f"{named!r} names no version; write POLICY@vN, as in starter@v3")
    return match["policy"], int(match["version"])


def _number_line(policy: str, number: int) -> str:
    return f"it is version {number} of {policy}; `whetstone versions promote {policy} {number}` lets it answer"


def _print_move(policy: str, move: Move, *more: str, as_json: bool) -> None:
    lines = [f"version {move.live} of {policy} answers now, {move.before} no longer"]
    if move.before == move.live:
        lines = [f"version {move.live} of {policy} answers already"]
    elif move.rejected:
        lines.append(f"rejected: {', '.join(map(str, move.rejected))}")
    fields = {"policy": policy, "before": move.before, "live_version": move.live, "rejected": move.rejected}
    report(fields, *lines, *more, as_json=as_json)


def _table(policy: str, rows: list[dict[str, Any]], rewards: training.Rewards, *, wide: bool) -> RenderableType:
    """Return a table of the versions for people."""
    shown = Table("version", "from", "state", "reason", "k3", "held out", "loaded", "when", title=escape(policy))
    shown.title_justify = "left"
    for row in rows:
        shown.add_row(
            str(row["version"]),
            escape(row["origin"] or ("" if row["parent"] is None else str(row["parent"]))),
            f"{row['state']} ({row['tested_by']})" if row["tested_by"] else row["state"],
            escape(row["reason"] or ""),
            "" if row["probe_k3"] is None else f"{row['probe_k3']:.2g}",
            _held_out(row, *rewards.get(("eval", row["version"]), (0, 0.0, 0.0))),
            _loaded(row),
            f"{row['promoted_at'] or row['created_at']:%Y-%m-%d %H:%M}",
        )
    return Listing(shown, ids=("from",), optional=("when", "k3", "loaded"), wide=wide)


def _held_out(row: dict[str, Any], count: int, total: float, _squares: float) -> str:
    """Return the mean reward of its held-out calls, else that of the gate's test, with their number."""
    if count:
        return f"{total / count:.3f} ({count})"
    return "" if row["heldout_mean"] is None else f"{row['heldout_mean']:.3f} ({row['heldout_count']})"


def _loaded(row: dict[str, Any]) -> str:
    if row["removed_at"]:
        return "removed"
    return ("pinned" if row["pinned_at"] else "yes") if row["served"] else "no"
