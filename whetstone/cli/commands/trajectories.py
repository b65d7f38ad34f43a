"""`whetstone trajectories` and `whetstone groups`: show what was recorded."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

import typer
from sqlalchemy import Connection

from migrations.run import upgrade
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    PolicyOption,
    WideOption,
    console,
    database_of,
    errors,
    print_json,
    running_settings,
    show,
)
from whetstone.cli.tables import trajectory_store, trajectory_tables
from whetstone.config.settings import Settings
from whetstone.database.engine import snapshot
from whetstone.domain.api_keys import read_lifetime
from whetstone.domain.states import GroupState, TrajectoryStatus

SHOWN = 20
SinceOption = Annotated[str | None, typer.Option("--since", help="Only those that began since: 30min, 12h, 7d")]
LimitOption = Annotated[int, typer.Option("--limit", "-n", min=1, help="Most of them, the newest first")]
ProjectOption = Annotated[str | None, typer.Option("--project", help="Whose [the policy's, or the home project's]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: an array, or with an id one object")]


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
    wide: WideOption = False,
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
        trajectory = _read(settings, lambda one: trajectory_store.trajectory(one, own.project, trajectory_id, ids=ids))
        conversations = [
            {"messages": one.messages, "tools": one.tools, "completion_ids": [completion.id for completion in one.line]}
            for one in trajectory_tables.conversations_of(trajectory)
        ]
        show(
            trajectory | {"conversations": conversations},
            lambda: trajectory_tables.trajectory_shown(trajectory),
            as_json=as_json,
        )
        return
    given = {
        "policy": policy, "task": task, "group_id": group, "state": state, "split": split, "why_not_trained": why,
        "last_version": version, "trained_in_step": step,
    }  # fmt: skip
    bounds: dict[str, Any] = {"since": _since(since), "rewards": (min_reward, max_reward), "limit": limit}
    newest = partial(trajectory_store.newest, of=trajectory_store.TRAJECTORIES, project=own.project, given=given)
    rows = _read(settings, partial(newest, **bounds))
    _show(rows, trajectory_tables.trajectories_table, limit, wide=wide, as_json=as_json)


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
    wide: WideOption = False,
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
        group = _read(settings, lambda one: trajectory_store.group(one, own.project, group_id))
        show(group, lambda: trajectory_tables.group_shown(group, datetime.now(UTC), wide=wide), as_json=as_json)
        return
    given = {"policy": policy, "state": state, "formed_by": formed_by, "reason": reason}
    newest = partial(trajectory_store.newest, of=trajectory_store.GROUPS, project=own.project, given=given)
    rows = _read(settings, partial(newest, since=_since(since), limit=limit))
    _show(rows, trajectory_tables.groups_table, limit, wide=wide, as_json=as_json)


def _show(rows: list[dict[str, Any]], table: Callable[..., Any], limit: int, *, wide: bool, as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif not rows:
        errors.print("nothing matches", style="dim")
    else:
        console.print(table(rows, datetime.now(UTC), wide=wide), crop=False)
        if len(rows) == limit:
            errors.print(f"the newest {limit}; --limit shows more", style="dim")


def _settings(data: Any, config: Any, project: str | None, policy: str | None) -> tuple[Settings, Settings]:
    settings = running_settings(data, config)
    return settings, settings.of_project(project) if project else settings.of_policy(policy)


def _read(settings: Settings, query: Callable[[Connection], Any]) -> Any:
    url = database_of(settings)
    upgrade(url)
    with snapshot(url) as connection:
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
