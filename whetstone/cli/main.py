"""`whetstone`: the command line.

Exit codes: 0 done; 1 it failed (the demo's reward did not rise); 2 it could not begin, and the message says what to
change.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import msgspec
import typer
from rich.markup import escape
from sqlalchemy.exc import ArgumentError, DBAPIError

from migrations.run import MigrationError, upgrade
from whetstone.cli.commands import sql, trajectories, versions
from whetstone.cli.commands.delete import delete
from whetstone.cli.commands.export import export
from whetstone.cli.commands.import_ import import_log
from whetstone.cli.commands.keys import keys
from whetstone.cli.commands.policies import policies
from whetstone.cli.commands.status import status
from whetstone.cli.commands.step import ask as ask_step
from whetstone.cli.commands.step import shown as step_shown
from whetstone.cli.commands.step import watch
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    console,
    database_of,
    engine_of,
    errors,
    has_database,
    policy_names,
    print_json,
    refusals,
    store_of,
)
from whetstone.cli.tables.sql_query import QueryFailed
from whetstone.config.settings import Settings, SettingsError, as_environment, load
from whetstone.database.engine import connect, without_password
from whetstone.doctor.log_checks import examine as examine_log
from whetstone.doctor.log_checks import shown as log_shown
from whetstone.doctor.vllm_checks import NothingToTest, examine, last_test, launch_arguments, of_running, shown
from whetstone.registry.projects import Store, UnknownPolicy
from whetstone.stack.admin_client import ProxyUnreachable, StackNotRunning
from whetstone.stack.supervisor import StartFailed
from whetstone.transfer.exporting.exporter import FilterRefused
from whetstone.transfer.exporting.files import CannotWrite
from whetstone.transfer.importing.importer import InvalidLog
from whetstone.transfer.importing.store import NotImportable

EXIT_CODES = (
    "Exit codes: 0 done; 1 it did not come out, or something is wrong; 2 it could not begin, and the message says what "
    "to change."
)
app = typer.Typer(
    help="An OpenAI-compatible proxy that logs and trains: change base_url, post feedback, ask the database.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(policies, name="policies")
app.add_typer(keys, name="keys")
ModelOption = Annotated[str | None, typer.Option("--model", help="Base model: folder or hub name [the starter]")]
PortOption = Annotated[int | None, typer.Option("--port", help="The proxy's port; 0 takes a free one")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of adapters, sampling and games [0]")]
MENDABLE = (
    SettingsError, StartFailed, MigrationError, UnknownPolicy, QueryFailed, NothingToTest, StackNotRunning,
    ProxyUnreachable, CannotWrite, FilterRefused, InvalidLog, NotImportable,
)  # fmt: skip
"""Errors whose messages say what to change."""


class _Stop(Exception):
    """SIGINT or SIGTERM was received."""


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
        outcome = run(settings, Plan(steps, games, connections, shuffle_rewards, untagged, pause_s), console)
    except AppFailed as error:
        errors.print(f"[red]the demo failed:[/red] {escape(str(error))}\nlogs: {settings.data}/logs")
        raise typer.Exit(1) from error
    except _Stop:
        errors.print("stopped")
        raise typer.Exit(1) from None
    raise typer.Exit(0 if outcome.rose else 1)


@app.command()
def migrate(data: DataOption = None, config: ConfigOption = None) -> None:
    """Migrate the database to this version's schema, and create the settings' projects and policies, as `up` does.

    Example:

        whetstone migrate
    """
    settings = load(config, data=data)
    settings.data.mkdir(parents=True, exist_ok=True)
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    try:
        Store(engine).prepare(settings)
    finally:
        engine.dispose()
    console.print(f"the database is up to date: {without_password(settings.database_url)}")


sql.add_to(app)


@app.command()
def doctor(
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object")] = False,
    stored: Annotated[bool, typer.Option("--stored", help="Show the last test, made at the start or since")] = False,
    log: Annotated[bool, typer.Option("--log", help="Only check the log; send nothing to vLLM")] = False,
) -> None:
    """Check whether training can rely on the stack's vLLM, and whether the log contains anything to learn from.

    Sends vLLM about fifteen short requests. Then it checks the newest attempts in the database: are they grouped,
    rewarded, and rewarded differently; how often does the base model succeed; were they sampled without restrictions;
    do tools have side effects?

    Exit code 0 if vLLM provides all that training needs, 1 if not, 2 if no vLLM answers. Findings in the log are only
    warnings.

    Examples:

        whetstone doctor
        whetstone doctor --log --json
    """
    settings = of_running(load(config, data=data))
    if log:
        checks = examine_log(engine_of(settings), settings)
        if as_json:
            print_json(checks)
        else:
            console.print(log_shown(checks, settings.policy))
        return
    test = last_test(settings, store_of(settings)) if stored else examine(settings, launch_arguments(settings.data))
    logged = examine_log(engine_of(settings), settings) if has_database(settings) else ()
    if as_json:
        print_json(msgspec.to_builtins(test) | {"log": logged})
    else:
        console.print(shown(test))
        if logged:
            console.print(log_shown(logged, settings.policy))
    if not stored and not (
        has_database(settings) and store_of(settings).keep_self_test(settings.project, settings.policy, test)
    ):
        errors.print(f"not stored: there is no policy {settings.policy} yet; `whetstone up` makes it", style="dim")
    raise typer.Exit(0 if test.trainable else 1)


@app.command()
def step(
    policy: Annotated[
        str | None, typer.Argument(help="Its name [the default policy]", autocompletion=policy_names)
    ] = None,
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
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Request it and do not wait")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what a step now would take and teach; nothing is written")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="With --dry-run: every row's token ids")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object")] = False,
) -> None:
    """Run one training step now, on the data that is available; `--dry-run` only shows the step, without a stack.

    Exit code 0 if its version went live, 1 if not, 2 if no stack runs.

    Examples:

        whetstone step starter
        whetstone step --imitate best --min-reward 1
        whetstone step --dry-run
    """
    settings = of_running(load(config, data=data))
    if dry_run:
        if imitate is not None or no_wait:
            raise typer.BadParameter("--dry-run shows a policy-gradient step; leave out --imitate and --no-wait")
        _dry_run(settings, [name for name in (policy,) if name], rows=rows, as_json=as_json)
    if rows:
        raise typer.BadParameter("--rows goes with --dry-run")
    if imitate is None and (min_reward is not None or limit is not None):
        raise typer.BadParameter("--min-reward and --limit go with --imitate")
    given = {"from": imitate, "min_reward": min_reward, "limit": limit}
    body = {"kind": "sft" if imitate else "grpo"} | {name: value for name, value in given.items() if value is not None}
    name = policy or settings.policy
    with refusals():
        requested_at = ask_step(settings.data, name, body)
        if no_wait:
            if as_json:
                print_json({"policy": name, "asked_at": requested_at})
            else:
                console.print(f'requested a step of {name}; `whetstone sql` "SELECT * FROM admin_steps" shows it')
            return
        store = Store(connect(settings.database_url))
        ended = watch(settings.of_policy(name), store, name, requested_at, errors if as_json else console)
    if as_json:
        print_json(ended)
    else:
        console.print(step_shown(ended))
    if ended["state"] != "promoted":
        errors.print(f"[red]{ended['state']}:[/red] {escape(ended['error'] or '')}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


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
    raise typer.Exit(subprocess.run(command, check=False).returncode)


versions.add_to(app)
trajectories.add_to(app)
app.command()(status)
app.command()(export)
app.command("import")(import_log)
app.command()(delete)


def _dry_run(settings: Settings, arguments: list[str], *, rows: bool, as_json: bool) -> NoReturn:
    database_of(settings)
    arguments += [flag for flag, given in (("--rows", rows), ("--json", as_json)) if given]
    # The environment contains all settings; a whetstone.toml in the working directory must not add to them.
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    command = [sys.executable, "-P", "-m", "trainer", *arguments]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)


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
    except MENDABLE as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except DBAPIError as error:
        message = f"the database does not answer: {str(error.orig).strip()}"
        errors.print(f"[red]whetstone:[/red] {escape(message)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except (ArgumentError, UnicodeEncodeError, OverflowError) as error:
        # A number, text or URL that no database or terminal can process.
        errors.print(f"[red]whetstone:[/red] {escape(ascii(str(error)))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output has closed it. Python would report that once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
