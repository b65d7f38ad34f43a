"""`whetstone trajectories` and `whetstone groups`: show what was recorded."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import typer
from sqlalchemy import Connection
from sqlalchemy.sql.expression import TableClause

from migrations.run import upgrade
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    PolicyOption,
    console,
    database_of,
    errors,
    print_json,
    refusals,
)
from whetstone.cli.tables import trajectory_store, trajectory_tables
from whetstone.cli.tables.trajectory_tables import NotFound
from whetstone.config.settings import Settings, load
from whetstone.database.engine import snapshot
from whetstone.doctor.vllm_checks import of_running
from whetstone.domain.api_keys import read_lifetime
from whetstone.domain.states import GroupState, TrajectoryStatus

SHOWN = 20
WIDE = 100
"""Width of a screen from which tables show more columns."""
SinceOption = Annotated[str | None, typer.Option("--since", help="Only those that began since: 30min, 12h, 7d")]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Most of them, the newest first")]
ProjectOption = Annotated[str | None, typer.Option("--project", help="Whose [the policy's, or the home project's]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: an array, or with an id one object")]


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (trajectories, groups):
        app.command()(command)


def trajectories(
    trajectory_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show this one in full")] = None,
    policy: PolicyOption = None,
    task: Annotated[str | None, typer.Option("--task", help="Only with this label")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only of this group")] = None,
    state: Annotated[TrajectoryStatus | None, typer.Option("--state", help="Only in this state")] = None,
    split: Annotated[Literal["train", "eval"] | None, typer.Option("--split", help="Only of this one")] = None,
    why: Annotated[
        str | None, typer.Option("--why", help="Only with this why_not_trained; docs/why_not_trained.md has them")
    ] = None,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Only those that this one ended")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Only those that this step trained on")] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Least reward")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Greatest reward")] = None,
    since: SinceOption = None,
    limit: LimitOption = SHOWN,
    ids: Annotated[bool, typer.Option("--ids", help="With an id and --json: token ids and logprobs too")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """List recorded trajectories, the newest first; with an id, show one in full, as a conversation.

    Exit code 0, or 1 if there is no trajectory of that id. JSON uses the names of `admin_trajectories`.

    Examples:

        whetstone trajectories --why no_reward --since 1h
        whetstone trajectories game-17
    """
    settings, own = _settings(data, config, project, policy)
    if trajectory_id is not None:
        trajectory = _read(
            settings, lambda one: _one(one, own.project, trajectory_id, trajectory_store.TRAJECTORIES, ids=ids)
        )
        if as_json:
            print_json(
                trajectory
                | {"conversations": [_conversation(one) for one in trajectory_tables.conversations_of(trajectory)]}
            )
        else:
            console.print(trajectory_tables.trajectory_shown(trajectory))
        return
    given: dict[str, Any] = {
        "policy": policy,
        "task": task,
        "group_id": group,
        "state": state,
        "split": split,
        "why_not_trained": why,
    }
    given |= {"last_version": version, "trained_in_step": step}
    filters = {name: value for name, value in given.items() if value is not None}
    rewards, began = (min_reward, max_reward), _since(since)
    rows = _read(
        settings,
        lambda one: trajectory_store.trajectories(one, own.project, filters, since=began, rewards=rewards, limit=limit),
    )
    _show(rows, trajectory_tables.trajectories_table, limit, as_json=as_json)


def groups(
    group_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Show this one with its members")] = None,
    policy: PolicyOption = None,
    state: Annotated[GroupState | None, typer.Option("--state", help="Only in this state")] = None,
    formed_by: Annotated[
        Literal["header", "prompt", "choices", "shadow", "evaluation", "single"] | None,
        typer.Option("--formed-by", help="Only those that came about so"),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Only those that were discarded for this")] = None,
    since: SinceOption = None,
    limit: LimitOption = SHOWN,
    project: ProjectOption = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """List groups of attempts that are compared with one another, the newest first; with an id, show one in full.

    Exit code 0, or 1 if there is no group of that id. JSON uses the names of `admin_groups`.

    Examples:

        whetstone groups --state discarded --since 1d
        whetstone groups g-3
    """
    settings, own = _settings(data, config, project, policy)
    if group_id is not None:
        group = _read(settings, lambda one: _one(one, own.project, group_id, trajectory_store.GROUPS))
        if as_json:
            print_json(group)
        else:
            console.print(trajectory_tables.group_shown(group, datetime.now(UTC)))
        return
    given = {"policy": policy, "state": state, "formed_by": formed_by, "reason": reason}
    filters = {name: value for name, value in given.items() if value is not None}
    began = _since(since)
    rows = _read(settings, lambda one: trajectory_store.groups(one, own.project, filters, since=began, limit=limit))
    _show(rows, trajectory_tables.groups_table, limit, as_json=as_json)


def _show(rows: list[dict[str, Any]], table: Callable[..., Any], limit: int, *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif not rows:
        errors.print("nothing matches", style="dim")
    else:
        console.print(table(rows, datetime.now(UTC), wide=console.width >= WIDE))
        if len(rows) == limit:
            errors.print(f"the newest {limit}; --limit shows more", style="dim")


def _conversation(one: Any) -> dict[str, Any]:
    return {"messages": one.messages, "tools": one.tools, "completion_ids": [completion.id for completion in one.line]}


def _one(connection: Connection, project: str, its_id: str, of: TableClause, *, ids: bool = False) -> dict[str, Any]:
    if of is trajectory_store.GROUPS:
        row = trajectory_store.group(connection, project, its_id)
    else:
        row = trajectory_store.trajectory(connection, project, its_id, ids=ids)
    if row is None:
        what = "group" if of is trajectory_store.GROUPS else "trajectory"
        alike = trajectory_store.named_like(connection, project, its_id, of, 5)
        suggestion = f"; there are: {', '.join(alike)}" if alike else ""
        raise NotFound(f"there is no {what} {its_id!r} in project {project}{suggestion}")
    return row


def _settings(data: Any, config: Any, project: str | None, policy: str | None) -> tuple[Settings, Settings]:
    settings = of_running(load(config, data=data))
    return settings, settings.of_project(project) if project else settings.of_policy(policy)


def _read(settings: Settings, query: Callable[[Connection], Any]) -> Any:
    url = database_of(settings)
    upgrade(url)
    with refusals(), snapshot(url) as connection:
        return query(connection)


def _since(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        if text.endswith("min"):
            return datetime.now(UTC) - timedelta(minutes=float(text.removesuffix("min")))
        return datetime.now(UTC) - read_lifetime(text)
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter("write 30min, 12h, 7d or 2w", param_hint="--since") from error
