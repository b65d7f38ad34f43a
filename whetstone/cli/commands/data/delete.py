"""`whetstone delete`: options, output and exit codes. The work is done by `privacy.eraser`."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape
from sqlalchemy import Engine

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    check,
    console,
    engine_of,
    errors,
    print_json,
    running_settings,
)
from whetstone.domain.api_keys import read_lifetime
from whetstone.privacy import eraser, store
from whetstone.privacy.store import Target


def delete(
    trajectory: Annotated[list[str] | None, typer.Option("--trajectory", help="Its id; once for each")] = None,
    user: Annotated[str | None, typer.Option("--user", help="End user of the calls, as their app named them")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="What had its last call this long ago: 12h, 90d, 2w")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose [the home project's]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go; nothing is written")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one array")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete trajectories with everything recorded of them, and list the adapters that were trained on them.

    Forks and continuations of a trajectory, the other choices of its calls and their retries are deleted too. A
    trajectory that a step has claimed waits until the step is over: then the judging worker deletes it. docs/privacy.md
    lists what stays.

    Examples:

        whetstone delete --user alice --dry-run
        whetstone delete --older-than 90d --yes
    """
    check(
        {
            "say one of --trajectory, --user and --older-than": sum(map(bool, (trajectory, user, older_than))) != 1,
            "--json goes with --yes or --dry-run": as_json and not (yes or dry_run),
        }
    )
    settings = running_settings(data, config)
    own = settings.of_project(project or settings.home)
    engine = engine_of(settings)
    now = datetime.now(UTC)
    targets = _targets(own.project, trajectory, user, older_than, now)
    if dry_run or not yes:
        plans = [_plan(engine, target, now) for target in targets]
        _show(plans, as_json=as_json, begins="would go" if dry_run else "will go")
        if dry_run:
            return
        typer.confirm("Delete it for good?", abort=True)
    _show([eraser.run(engine, eraser.erasing(target, now)) for target in targets], as_json=as_json, begins="gone")


def _targets(
    project: str, trajectories: Sequence[str] | None, user: str | None, older_than: str | None, now: datetime
) -> list[Target]:
    if trajectories:
        return [Target(project, "trajectory", one) for one in trajectories]
    if user:
        return [Target(project, "user", user)]
    try:
        before = now - read_lifetime(older_than or "")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--older-than") from error
    return [Target(project, "age", before.isoformat())]


def _plan(engine: Engine, target: Target, now: datetime) -> dict[str, Any]:
    """Return what a deletion would remove, in the form of its row."""
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        trajectory_ids = store.find(connection, target, now, limit=None)
        completions, waiting, versions = store.count(connection, target.project, trajectory_ids)
    row = {"project": target.project, "kind": target.kind, "target": target.stored, "trajectories": len(trajectory_ids)}
    return row | {"completions": completions, "versions": versions, "waits_for": waiting or None}


def _show(rows: Sequence[Mapping[str, Any]], *, as_json: bool, begins: str) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        what = escape(f"{row['kind']} {row['target']}")
        console.print(f"{what}: {begins} {row['trajectories']} trajectories, {row['completions']} completions")
        if waiting := row["waits_for"]:
            errors.print(
                f"{len(waiting)} trajectories wait for the step that has them; the judging worker deletes them then",
                style="yellow",
            )
        for policy, versions in row["versions"].items():
            names = escape(", ".join(f"{policy}@v{version}" for version in versions))
            errors.print(f"adapters that have learned from it: {names}", style="yellow", soft_wrap=True)
    if any(row["versions"] for row in rows):
        errors.print("docs/privacy.md says what can be done with those", style="dim")
