"""`whetstone step`: request a step from the running proxy, and watch it until it is over."""

import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    JsonObjectOption,
    PolicyArgument,
    check,
    console,
    database_of,
    errors,
    running_settings,
    show,
)
from whetstone.config.settings import Settings, as_environment
from whetstone.database.engine import connect
from whetstone.registry.projects import Store
from whetstone.stack import admin_client
from whetstone.terminal.fitting import Fitting

LOOK_EVERY_S = 0.2
UNSEEN_S = 30
"""After this many seconds, report that no worker has the step: the training worker is busy with another policy, or
dead."""
IN_TESTS = "waits for the tests of its candidate (SELECT * FROM admin_versions; Ctrl-C leaves it to them)"
FIGURES = (
    "groups", "trajectories", "completions", "rows", "sampled_tokens", "reward_mean", "reward_spread", "loss", "kl",
    "entropy", "mismatch_k3", "grad_norm", "tokens_per_s", "seconds",
)  # fmt: skip
"""Columns of a step that are shown if they are not NULL."""


class _StepResponse(msgspec.Struct):
    """The fields of the proxy's answer that are used here."""

    asked_at: datetime
    """Identifies the requested step."""


def step(
    policy: PolicyArgument = None,
    imitate: Annotated[
        str | None,
        typer.Option("--imitate", help="A supervised step: on `demonstrations`, the `best` answers, or a policy's"),
    ] = None,
    hindsight: Annotated[
        Literal["comments", "demonstrations", "judge", "tools", "replies"] | None,
        typer.Option(
            "--hindsight",
            help="A step that learns from words about single answers: feedback's `comments` or `demonstrations`, the "
            "`judge`'s explanations, errors of `tools`, or users' `replies`",
        ),
    ] = None,
    distill: Annotated[
        str | None,
        typer.Option("--distill", help="A step that learns from a teacher of the settings: it scores own answers"),
    ] = None,
    prefer: Annotated[
        str | None,
        typer.Option("--prefer", help="A step on pairs of answers of another policy, an imported log's for example"),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Least reward of an answer to imitate")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Most answers, or pairs, to learn from [64]")
    ] = None,
    data: DataOption = None,
    config: ConfigOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Request it and do not wait")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what a step now would take and teach; nothing is written")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="With --dry-run: every row's token ids")] = False,
    as_json: JsonObjectOption = False,
) -> None:
    """Run one training step now, on the data that is available; `--dry-run` only shows the step, without a stack.

    Exit code 0 if its version went live, 1 if not, 2 if no stack runs.

    Examples:

        whetstone step starter
        whetstone step --imitate best --min-reward 1
        whetstone step --hindsight comments
        whetstone step --distill large
        whetstone step --prefer imported
        whetstone step --dry-run
    """
    settings = running_settings(data, config)
    given = {"sft": imitate, "hindsight": hindsight, "distill": distill, "prefer": prefer}
    by_example = [(kind, source) for kind, source in given.items() if source is not None]
    options = "--imitate, --hindsight, --distill, --prefer"
    check(
        {
            f"--dry-run shows a step on rewards; leave out {options} and --no-wait": dry_run
            and (bool(by_example) or no_wait),
            "--rows goes with --dry-run": rows and not dry_run,
            f"{options} are kinds of step: choose one": len(by_example) > 1,
            "--min-reward goes with --imitate": min_reward is not None and imitate is None and not dry_run,
            f"--limit goes with one of {options}": limit is not None and not by_example and not dry_run,
        }
    )
    if dry_run:
        _dry_run(settings, policy, rows=rows, as_json=as_json)
    name = policy or settings.policy
    kind, source = by_example[0] if by_example else ("grpo", None)
    fields = {"kind": kind, "from": source, "min_reward": min_reward, "limit": limit}
    answer = admin_client.ask(settings.data, name, "step", fields, look='`whetstone sql "SELECT * FROM admin_steps"`')
    requested_at = msgspec.json.decode(answer, type=_StepResponse).asked_at
    if no_wait:
        message = f'requested a step of {name}; `whetstone sql` "SELECT * FROM admin_steps" shows it'
        show({"policy": name, "asked_at": requested_at}, lambda: message, as_json=as_json)
        return
    store = Store(connect(settings.database_url))
    ended = _watch(settings.of_policy(name), store, name, requested_at, errors if as_json else console)
    show(ended, lambda: _shown(ended), as_json=as_json)
    if ended["state"] != "promoted":
        errors.print(f"[red]{ended['state']}:[/red] {escape(ended['error'] or '')}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _dry_run(settings: Settings, policy: str | None, *, rows: bool, as_json: bool) -> NoReturn:
    """Run the trainer's program, which has torch."""
    database_of(settings)
    flags = [flag for flag, given in (("--rows", rows), ("--json", as_json)) if given]
    # The environment contains all settings; a whetstone.toml in the working directory must not add to them.
    environment = {**os.environ, **as_environment(settings, config=Path(os.devnull))}
    command = [sys.executable, "-P", "-m", "trainer", *([policy] if policy else []), *flags]
    raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)


def _watch(settings: Settings, store: Store, policy: str, requested_at: datetime, console: Console) -> dict[str, Any]:
    """Show the progress of the step until it has ended; return its row.

    Raises:
        RefusedByProxy: the stack was stopped meanwhile.
    """
    began = time.monotonic()
    with console.status("requested; waiting for the training worker") as status:
        while True:
            step = store.step_requested_at(settings.project, policy, requested_at)
            waited_s = time.monotonic() - began
            if step is not None:
                if step["ended_at"] is not None:
                    return step
                is_in = IN_TESTS if step["state"] == "waiting_gate" else f"is {step['state']}"
                status.update(f"step {step['number']} of {escape(policy)} {is_in}, {waited_s:.0f} s")
            elif waited_s > UNSEEN_S:
                log = settings.data / "logs" / "trainer.log"
                status.update(f"no worker has taken it for {waited_s:.0f} s; {escape(str(log))} says what it does")
            if not (settings.data / "up.json").exists():
                raise admin_client.RefusedByProxy("the stack was stopped; the step goes on when it is started again")
            time.sleep(LOOK_EVERY_S)


def _shown(step: dict[str, Any]) -> RenderableType:
    """Return a table of the step's figures."""
    table = Table(show_header=False, title=f"step {step['number']} of {escape(step['policy'])}", title_justify="left")
    table.add_row("kind", step["kind"])
    table.add_row("from", f"version {step['version_in']}")
    if step["version_out"] is not None:
        table.add_row("made", f"version {step['version_out']}, {step['state']}")
    for name in FIGURES:
        if (value := step[name]) is not None:
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return Fitting(table)
