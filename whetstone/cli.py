"""`whetstone`: the command line. Knows words and exit codes; the work is done elsewhere.

Exit codes: 0 done; 1 it did not come out (the demo's reward did not rise); 2 it could not begin, and the message says
what to change.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from migrations.database import connect, without_password
from migrations.run import MigrationError, upgrade
from whetstone import cli_versions
from whetstone.admin import NoStack, NotAsked
from whetstone.ask import QueryFailed, ask
from whetstone.cli_keys import keys
from whetstone.cli_policies import policies
from whetstone.cli_privacy import delete
from whetstone.cli_shared import (
    ConfigOption,
    DataOption,
    console,
    database_of,
    errors,
    has_database,
    refusals,
    store_of,
)
from whetstone.doctor import NothingToTest, examine, last_test, of_running, shown
from whetstone.settings import Settings, SettingsError, as_environment, load
from whetstone.step import ask as ask_step
from whetstone.step import shown as step_shown
from whetstone.step import watch
from whetstone.store import Store, UnknownPolicy
from whetstone.supervisor import StartFailed

app = typer.Typer(
    help="An OpenAI-compatible proxy that logs and trains.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(policies, name="policies")
app.add_typer(keys, name="keys")
ModelOption = Annotated[str | None, typer.Option("--model", help="Base model: folder or hub name [the starter]")]
PortOption = Annotated[int | None, typer.Option("--port", help="The proxy's port; 0 takes a free one")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of adapters, sampling and games [0]")]
MENDABLE = (
    SettingsError, StartFailed, MigrationError, UnknownPolicy, QueryFailed, NothingToTest, NoStack, NotAsked,
)  # fmt: skip
"""Errors whose messages say what to change."""


class _Stop(Exception):
    """SIGINT or SIGTERM came."""


@app.command()
def up(
    data: DataOption = None,
    config: ConfigOption = None,
    model: ModelOption = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Name that apps ask for [starter]")] = None,
    port: PortOption = None,
    seed: SeedOption = None,
    train: Annotated[bool, typer.Option("--train", help="Let the policy train, not only record")] = False,
) -> None:
    """Start the stack and keep it up: broker, vLLM, proxy, workers. Ctrl-C or SIGTERM stops all of it.

    <data>/up.json has the addresses once it is ready; logs are in <data>/logs.
    """
    from whetstone.up import running

    settings = load(config, data=data, model=model, policy=policy, proxy__port=port, seed=seed)
    _stop_on_signals()
    try:
        with running(settings, console.print) as stack:
            if train:
                Store(connect(stack.settings.database_url)).set_policy_state(
                    settings.project, settings.policy, "training"
                )
            console.print(f"ready: base_url {stack.proxy_url}/v1, model {settings.policy} ({settings.data}/up.json)")
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
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The control: rewards of other games, nothing to learn")
    ] = False,
    untagged: Annotated[
        bool, typer.Option("--untagged", help="The agent names neither games nor groups; both are found")
    ] = False,
) -> None:
    """Watch a stock OpenAI agent get better at tic-tac-toe because its base_url points at us.

    Exit code 0 only if the reward rose: the 95 % intervals of first and last version on held-out games do not overlap.
    """
    from whetstone.apps import AppFailed
    from whetstone.demo import Plan, run

    settings = load(config, data=data or Path("data/demo"), seed=seed, proxy__port=0)
    _stop_on_signals()
    try:
        outcome = run(settings, Plan(steps, games, connections, shuffle_rewards, untagged), console)
    except AppFailed as error:
        errors.print(f"[red]the demo failed:[/red] {error}\nlogs: {settings.data}/logs")
        raise typer.Exit(1) from error
    except _Stop:
        errors.print("stopped")
        raise typer.Exit(1) from None
    raise typer.Exit(0 if outcome.rose else 1)


@app.command()
def migrate(data: DataOption = None, config: ConfigOption = None) -> None:
    """Bring the database to this version's schema. `up` does it by itself."""
    settings = load(config, data=data)
    settings.data.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database_url)
    console.print(f"the database is up to date: {without_password(settings.database_url)}")


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="For example: SELECT * FROM admin_steps")],
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Ask the database, read-only. The views admin_* are made for this; docs/tables.md has what is behind them."""
    columns, rows = ask(database_of(load(config, data=data)), query)
    table = Table(*columns)
    for row in rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row))
    console.print(table)
    console.print(f"{len(rows)} rows", style="dim")


@app.command()
def doctor(
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object")] = False,
    stored: Annotated[bool, typer.Option("--stored", help="Show the last test, made at the start or since")] = False,
) -> None:
    """Ask the stack's vLLM about fifteen short questions: can training rely on what it answers?

    Exit code 0 if all that training needs is there, 1 if not, 2 if no vLLM answers.
    """
    settings = of_running(load(config, data=data))
    test = last_test(settings, store_of(settings)) if stored else examine(settings)
    if as_json:
        typer.echo(msgspec.json.encode(test).decode())
    else:
        console.print(shown(test))
    if not stored and not (
        has_database(settings) and store_of(settings).keep_self_test(settings.project, settings.policy, test)
    ):
        errors.print(f"not stored: there is no policy {settings.policy} yet; `whetstone up` makes it", style="dim")
    raise typer.Exit(0 if test.trainable else 1)


@app.command()
def step(
    policy: Annotated[str | None, typer.Argument(help="Its name [the default policy]")] = None,
    imitate: Annotated[
        str | None,
        typer.Option("--imitate", help="A supervised step: on `demonstrations`, the `best` answers, or a policy's"),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Least reward of an answer to imitate")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most answers to imitate [64]")] = None,
    data: DataOption = None,
    config: ConfigOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask for it and leave")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what a step now would take and teach; nothing is written")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="With --dry-run: every row's token ids")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON, one object")] = False,
) -> None:
    """Have the policy take a step now, with whatever is there to train on; `--dry-run` only shows it, without a stack.

    Exit code 0 if its version went live, 1 if not, 2 if no stack runs.
    """
    settings = of_running(load(config, data=data))
    if dry_run:
        if imitate is not None or no_wait:
            raise typer.BadParameter("--dry-run shows a policy-gradient step; leave out --imitate and --no-wait")
        _dry_run(settings, [name for name in (policy,) if name], rows=rows, as_json=as_json)
    if rows or as_json:
        raise typer.BadParameter("--rows and --json go with --dry-run")
    if imitate is None and (min_reward is not None or limit is not None):
        raise typer.BadParameter("--min-reward and --limit go with --imitate")
    given = {"from": imitate, "min_reward": min_reward, "limit": limit}
    asked = {name: value for name, value in given.items() if value is not None}
    body = {"kind": "sft" if imitate else "grpo"} | asked
    name = policy or settings.policy
    with refusals():
        asked_at = ask_step(settings.data, name, body)
        if no_wait:
            console.print(f'asked for a step of {name}; `whetstone sql` "SELECT * FROM admin_steps" shows it')
            return
        ended = watch(settings.of_policy(name), Store(connect(settings.database_url)), name, asked_at, console)
    console.print(step_shown(ended))
    if ended["state"] != "promoted":
        errors.print(f"[red]{ended['state']}:[/red] {escape(ended['error'] or '')}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def judge(context: typer.Context) -> None:
    """See how good judges are: `judge calibrate`, against what people or rules said; `judge report`, with alarms."""
    command = [sys.executable, "-P", "-m", "judge.ruler", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


cli_versions.add_to(app)
app.command()(delete)


def _dry_run(settings: Settings, arguments: list[str], *, rows: bool, as_json: bool) -> NoReturn:
    database_of(settings)
    arguments += [flag for flag, given in (("--rows", rows), ("--json", as_json)) if given]
    # Everything is in the environment; a whetstone.toml that lies about must not add to it.
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    command = [sys.executable, "-P", "-m", "trainer", *arguments]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)


def _stop_on_signals() -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        # A second signal must not interrupt the stopping.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def main() -> None:
    """Run the command line; errors that a user can mend end with their message and code 2."""
    try:
        app()
    except MENDABLE as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
