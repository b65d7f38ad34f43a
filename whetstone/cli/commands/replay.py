"""`whetstone replay`: send a recorded trajectory's prompts to a version again, and show what differs."""

import re
from typing import Annotated, Any

import typer

from migrations.run import upgrade
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonOption,
    database_of,
    errors,
    running_settings,
    show,
)
from whetstone.cli.tables import replay as replays
from whetstone.cli.tables import trajectory_store
from whetstone.database.engine import snapshot
from whetstone.domain.ids import new_id, version_id
from whetstone.stack.admin_client import RefusedByProxy
from whetstone.stack.chat_client import ChatClient
from whetstone.transfer.repeat import evaluation_headers

VERSION = re.compile(r"(?:(?P<policy>.+)@)?v?(?P<version>0|[1-9][0-9]{0,8})")


def replay(
    trajectory: Annotated[str, typer.Argument(help="Its id, as `whetstone trajectories` shows it")],
    version: Annotated[
        str | None, typer.Option("--version", help="v7, or POLICY@v7 for another policy [the live version]")
    ] = None,
    project: Annotated[str | None, typer.Option("--project", help="Whose [the home project's]")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Send a recorded trajectory's prompts to a version again, and show how its answers differ.

    Each turn is sent with the recorded messages before it and with its own sampling fields, so that turns are compared
    one by one. The calls are recorded as evaluation (`X-Split: eval`, `X-No-Train`), and their metadata has
    `replay_of`: no step trains on them. Only chat completions are sent. The stack must run and the version be loaded
    (`whetstone versions pin` loads it).

    Exit code 0 if all prompts are answered, 1 if one is refused or none can be sent, 2 if no stack runs.

    Examples:

        whetstone replay game-17
        whetstone replay game-17 --version v7 --json
    """
    settings = running_settings(data, config)
    url, own = database_of(settings), settings.of_project(project or settings.home)
    upgrade(url)
    with snapshot(url) as connection:
        recorded = trajectory_store.trajectory(connection, own.project, trajectory, ids=False)
    name = _model(version, recorded["policy"])
    client = ChatClient(settings.data)
    prompts, skipped = replays.prompts(recorded)
    comparisons = []
    with errors.status("sending") as status:
        for prompt in prompts:
            status.update(f"turn {prompt.turn} of {trajectory} goes to {name}")
            comparisons.append(_send(client, prompt, name, recorded))
    show(
        [replays.as_object(one) | {"version": name} for one in comparisons],
        lambda: replays.shown(comparisons, skipped, name),
        as_json=as_json,
    )
    raise typer.Exit(0 if comparisons and all(one.error is None for one in comparisons) else 1)


def _model(version: str | None, policy: str) -> str:
    if version is None:
        return policy
    match = VERSION.fullmatch(version)
    if match is None:
        raise typer.BadParameter(f"{version!r} names no version; write v7, or starter@v7", param_hint="--version")
    return version_id(match["policy"] or policy, int(match["version"]))


def _send(client: ChatClient, prompt: replays.Prompt, model: str, recorded: dict[str, Any]) -> replays.Comparison:
    headers = evaluation_headers(f"replay-{new_id()}", {"replay_of": prompt.completion_id}, recorded["task"])
    try:
        return replays.compare(prompt, client.complete({"model": model, **prompt.body}, headers))
    except RefusedByProxy as error:
        return replays.failed(prompt, str(error))
