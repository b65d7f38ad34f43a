"""Show what a training step would do now (`python -m trainer`, started by `whetstone step --dry-run`). Read-only.

Settings come from the environment. Exit codes: 0 shown; 1 the step would fail; 2 it could not begin.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from migrations.run import MigrationError, check
from trainer.domain.rows import Row
from trainer.step.dry_run import DryRun, dry_run
from whetstone.config.settings import SettingsError, load
from whetstone.database.engine import snapshot
from whetstone.terminal.fitting import Fitting

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)
console = Console()
errors = Console(stderr=True)


@app.command()
def show(
    policy: Annotated[str | None, typer.Argument(help="Its name [the default policy]")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Every row's token ids, the trained ones in brackets")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object, with every row")] = False,
) -> None:
    """Show what a step now would take and teach; nothing is written.

    Example:

        whetstone step starter --dry-run
    """
    settings = load().of_policy(policy)
    with snapshot(settings.database_url) as connection:
        check(connection)
        now = datetime.now(UTC)
        name = policy or settings.policy
        plan = dry_run(connection, settings.project, name, settings.trainer, now, settings.parts_learning_of(name))
    if as_json:
        typer.echo(msgspec.json.encode(plan).decode())
        return
    if plan.trajectories:
        console.print(Fitting(_trajectories(plan)))
    if plan.discarded:
        console.print(Fitting(_discarded(plan)))
    for line in [*sentences(plan), *(map(spelled, plan.rows) if rows else ())]:
        console.print(escape(line), highlight=False, soft_wrap=True)


def sentences(plan: DryRun) -> Iterator[str]:
    """Yield the summary of the step as sentences."""
    if plan.why_not_due is None:
        yield f"a step of {plan.policy} is due; nothing was written"
    else:
        yield f"no step of {plan.policy} is due: {plan.why_not_due}; nothing was written"
    if not plan.trajectories:
        return
    taught = [one for one in plan.trajectories if one.left_out is None]
    yield (
        f"{'it' if plan.why_not_due is None else 'requested by hand, it'} would take "
        f"{len({one.group_id for one in plan.trajectories})} groups with {len(plan.trajectories)} trajectories, of "
        f"which {len(taught)} teach: {sum(one.completions for one in taught)} completions in {len(plan.rows)} rows, "
        f"{sum(one.read_tokens for one in taught)} tokens read, {sum(one.sampled_tokens for one in taught)} trained; "
        f"from version {plan.version_in}"
    )


def spelled(row: Row) -> str:
    """Return a row's advantages, in order, and its token ids as text, with the trained ids in brackets."""
    trained = (gap for gap, sampled in zip(row.advantages_T, row.sampled_T, strict=True) if sampled)
    advantages = " ".join(f"{gap:+.4f}" for gap, _ in groupby(trained))
    ids = (f"[{t}]" if sampled else str(t) for t, sampled in zip(row.token_ids_T, row.sampled_T, strict=True))
    return f"{row.trajectory_id} {advantages}: {' '.join(ids)}"


def _trajectories(plan: DryRun) -> Table:
    table = Table("group", "trajectory", "reward", "baseline", "advantage", "rows", "tokens", "versions", "left out")
    table.title, table.title_justify = f"{plan.policy}, from version {plan.version_in}", "left"
    table.caption = "rows: completions > rows after merging; tokens: read / trained"
    for one in plan.trajectories:
        table.add_row(
            escape(one.group_id),
            escape(one.trajectory_id),
            f"{one.reward:.4g}",
            "–" if one.baseline is None else f"{one.baseline:.4g}",
            "–" if one.advantage is None else f"{one.advantage:+.4f}",
            f"{one.completions} > {one.rows}",
            f"{one.read_tokens} / {one.sampled_tokens}",
            " ".join(map(str, one.versions)) or "–",
            escape(one.left_out or ""),
        )
    return table


def _discarded(plan: DryRun) -> Table:
    table = Table("would be discarded", "groups", "which")
    for reason, group_ids in plan.discarded.items():
        table.add_row(reason, str(len(group_ids)), escape(" ".join(group_ids)))
    return table


def main() -> None:
    """Run the command line. Print errors that the user can fix as a message, without a traceback."""
    try:
        app(prog_name="whetstone step --dry-run")
    except (SettingsError, MigrationError, SQLAlchemyError) as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
