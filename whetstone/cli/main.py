"""`whetstone`: the command line.

Exit codes: 0 done; 1 it failed (the demo's reward did not rise); 2 it could not begin, and the message says what to
change.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.markup import escape
from sqlalchemy.exc import ArgumentError, DBAPIError
from typer.core import TyperGroup

from migrations.run import MigrationError
from whetstone import __version__
from whetstone.cli.commands.data.backup import backup, restore
from whetstone.cli.commands.data.delete import delete
from whetstone.cli.commands.data.export import export
from whetstone.cli.commands.data.import_ import import_log
from whetstone.cli.commands.data.sql import sql, sql_role
from whetstone.cli.commands.doctor import doctor
from whetstone.cli.commands.keys import keys
from whetstone.cli.commands.logs import logs
from whetstone.cli.commands.models import models
from whetstone.cli.commands.policies import policies
from whetstone.cli.commands.replay import replay
from whetstone.cli.commands.status import status
from whetstone.cli.commands.step import step
from whetstone.cli.commands.tail import tail
from whetstone.cli.commands.trajectories import groups, trajectories
from whetstone.cli.commands.versions import pin, promote, rollback, versions
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    console,
    database,
    errors,
    fail,
    print_json,
)
from whetstone.cli.tables.trajectory_store import NotFound
from whetstone.config.settings import load
from whetstone.database.engine import connect, without_password
from whetstone.errors import WhetstoneError
from whetstone.registry.adapters import NotCopied
from whetstone.registry.projects import Store
from whetstone.registry.versions import LedgerError
from whetstone.stack.admin_client import RefusedByProxy

EXIT_CODES = (
    "Exit codes: 0 done; 1 it did not come out, or something is wrong; 2 it could not begin, and the message says what "
    "to change."
)


class _Commands(TyperGroup):
    """Ends a command that was refused with the message of the refusal, and code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (RefusedByProxy, NotCopied, NotFound, LedgerError) as error:
            fail(str(error))


app = typer.Typer(
    cls=_Commands,
    help="""An OpenAI-compatible proxy that logs and trains: change base_url, post feedback, ask the database.

    Examples:

        whetstone up
        whetstone status
        whetstone tail
    """,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _print_version(context: typer.Context, wanted: bool) -> None:
    """Print the version and exit, but not while the shell completes."""
    if wanted and not context.resilient_parsing:
        typer.echo(f"whetstone {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Define the options of `whetstone` itself."""


for name, family in (("policies", policies), ("keys", keys), ("versions", versions), ("models", models)):
    app.add_typer(family, name=name)
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of adapters, sampling and games [0]")]


class _Stop(Exception):
    """SIGINT or SIGTERM was received."""


@app.command()
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


@app.command()
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


@app.command()
def migrate(data: DataOption = None, config: ConfigOption = None) -> None:
    """Migrate the database to this version's schema, and create the settings' projects and policies, as `up` does.

    Example:

        whetstone migrate
    """
    settings = load(config, data=data)
    with database(settings, create=True) as engine:
        Store(engine).prepare(settings)
    console.print(f"the database is up to date: {without_password(settings.database_url)}")


for command in (sql, sql_role, doctor, step):
    app.command()(command)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def judge(context: typer.Context) -> None:
    """Measure how good judges are: `judge calibrate` against people's or rules' verdicts; `judge report` with alarms.

    Example:

        whetstone judge calibrate --help
    """
    command = [sys.executable, "-P", "-m", "judge.audit", *context.args]
    raise typer.Exit(subprocess.call(command))


for other_command in (promote, rollback, pin, trajectories, groups, replay, status, logs, tail, export):
    app.command()(other_command)
app.command("import")(import_log)
for data_command in (delete, backup, restore):
    app.command()(data_command)


def _stop_on_signals() -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        # A second signal must not interrupt the shutdown.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def main() -> None:
    """Run the command line; errors that a user can fix end with their message and code 2."""
    try:
        app()
    except (WhetstoneError, MigrationError) as error:
        fail(str(error), code=2)
    except DBAPIError as error:
        fail(f"the database does not answer: {str(error.orig).strip()}", code=2)
    except (ArgumentError, UnicodeEncodeError, OverflowError) as error:
        # A number, text or URL that no database or terminal can process.
        fail(ascii(str(error)), code=2)
    except BrokenPipeError:
        # The reader of our output has closed it. Python would report that once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
