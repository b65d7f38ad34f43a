"""`whetstone up | demo | migrate`: start a stack and keep it running, watch one learn, prepare its database."""

import signal
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
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
    print_json,
)
from whetstone.config.settings import load
from whetstone.database.engine import connect, without_password
from whetstone.registry.projects import Store

SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of adapters, sampling and games [0]")]


class _Stop(Exception):
    """SIGINT or SIGTERM was received."""


def up(
    data: DataOption = None,
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option("--model", help="Base model: folder or hub name [the starter]")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Name that apps ask for [starter]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="The proxy's port; 0 takes a free one")] = None,
    seed: SeedOption = None,
    train: Annotated[bool, typer.Option("--train", help="Let the policy train, not only record")] = False,
) -> None:
    """Start the stack and keep it running: broker, vLLM, proxy, workers. Ctrl-C or SIGTERM stops all of it.

    `<data>/up.json` has the addresses once the stack is ready; logs are in `<data>/logs`.

    Example:

        whetstone up --model Qwen/Qwen2.5-7B-Instruct --train
    """
    from whetstone.stack.stack import running

    settings = load(config, data=data, model=model, policy=policy, proxy__port=port, seed=seed)
    _stop_on_signals()
    try:
        with running(settings, partial(console.print, highlight=False, soft_wrap=True), console) as stack:
            if train:
                Store(connect(stack.settings.database_url)).set_policy_state(
                    settings.project, settings.policy, "training"
                )
            console.print(
                f"ready: base_url {stack.proxy_url}/v1, model {settings.policy} ({settings.data}/up.json)",
                soft_wrap=True,
            )
            console.print(f"dashboard: {stack.proxy_url}/ui", soft_wrap=True)
            while True:
                for name in stack.watch():
                    console.print(f"{name} had died or hung and was started again; see {settings.data}/logs/{name}.log")
                time.sleep(0.5)
    except _Stop:
        console.print("stopped")


def demo(
    data: DataOption = None,
    config: ConfigOption = None,
    seed: SeedOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="GRPO steps to take")] = 32,
    games: Annotated[int, typer.Option("--games", min=20, help="Held-out games for each of the two versions")] = 800,
    connections: Annotated[int, typer.Option("--connections", min=1, max=256, help="Games in flight")] = 16,
    pause_s: Annotated[
        float, typer.Option("--pause-s", min=0, help="Rest of a connection between two training games")
    ] = 1.0,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The control: rewards of other games, nothing to learn")
    ] = False,
    untagged: Annotated[
        bool, typer.Option("--untagged", help="The agent names neither games nor groups; the proxy infers both")
    ] = False,
    as_json: JsonObjectOption = False,
) -> None:
    """Watch a stock OpenAI agent get better at tic-tac-toe because its base_url points at us.

    Exit code 0 only if the reward rose: the 95 % intervals of first and last version on held-out games do not overlap.

    Example:

        whetstone demo --steps 80
    """
    from whetstone.demo.agent_process import AppFailed
    from whetstone.demo.demo import Plan, run

    settings = load(config, data=data or Path("data/demo"), seed=seed, proxy__port=0)
    _stop_on_signals()
    try:
        plan = Plan(steps, games, connections, shuffle_rewards, untagged, pause_s)
        outcome = run(settings, plan, errors if as_json else console)
    except AppFailed as error:
        errors.print(f"[red]the demo failed:[/red] {escape(str(error))}\nlogs: {settings.data}/logs")
        raise typer.Exit(1) from error
    except _Stop:
        errors.print("stopped")
        raise typer.Exit(1) from None
    if as_json:
        print_json(asdict(outcome) | {"rose": outcome.rose})
    raise typer.Exit(0 if outcome.rose else 1)


def migrate(data: DataOption = None, config: ConfigOption = None) -> None:
    """Migrate the database to this version's schema, and create the settings' projects and policies, as `up` does.

    Example:

        whetstone migrate
    """
    settings = load(config, data=data)
    with database(settings, create=True) as engine:
        Store(engine).prepare(settings)
    console.print(f"the database is up to date: {without_password(settings.database_url)}")


def _stop_on_signals() -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        # A second signal must not interrupt the shutdown.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
