"""`whetstone export`: options, output and exit codes. The work is done by `transfer.exporting`."""

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from migrations.run import upgrade
from whetstone.cli.options import (
    ConfigOption,
    DataOption,
    PolicyOption,
    check,
    console,
    database_of,
    errors,
    running_settings,
)
from whetstone.transfer.exporting import files
from whetstone.transfer.exporting.exporter import ExportOptions, Kind, run
from whetstone.transfer.exporting.rows import Tally
from whetstone.transfer.exporting.store import Filter


class Inclusion(StrEnum):
    """What `--include` can include; the values of `transfer.exporting.rows.INCLUDABLE`."""

    EVAL = "eval"
    NO_TRAIN = "no_train"
    REDACTED = "redacted"
    CUT_OFF = "cut_off"


def export(
    kind: Annotated[
        Kind, typer.Argument(help="What a row is: an attempt, a pair of a group, an answer to imitate, or a rating")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", help="File that ends with .jsonl, .parquet or, for ratings, .csv; - writes lines to stdout"
        ),
    ],
    where: Annotated[
        str | None, typer.Option("--where", help="SQL condition on the columns of admin_trajectories")
    ] = None,
    query: Annotated[
        str | None, typer.Option("--query", help="SQL query whose column trajectory_id names what is meant")
    ] = None,
    policy: PolicyOption = None,
    task: Annotated[str | None, typer.Option("--task", help="Only with this label")] = None,
    split: Annotated[
        Literal["train", "eval"] | None, typer.Option("--split", help="Only this one; eval includes it")
    ] = None,
    include: Annotated[
        list[Inclusion] | None, typer.Option("--include", help="What is left out otherwise; once for each")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="trajectories: with token ids and logprobs")] = False,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Least reward; sft then takes all that have it")
    ] = None,
    source: Annotated[
        Literal["best", "demonstrations", "both"], typer.Option("--source", help="sft: whose answers")
    ] = "both",
    min_gap: Annotated[
        float, typer.Option("--min-gap", min=0, help="preferences: least distance of two rewards")
    ] = 0.0,
    pairs: Annotated[
        Literal["best", "all"],
        typer.Option("--pairs", help="preferences: best against worst, or each against each that is worse"),
    ] = "best",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Most rows [all]")] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Whose [the policy's, or the home project's]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON, one object")] = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Write trajectories, preference pairs or answers to imitate to a file that trainers and `datasets` read; or
    ratings of people.

    Split eval, X-No-Train, redacted text and incomplete answers are left out unless --include names them; the output
    says how many. Of ratings nothing is left out. The file is written completely or not at all. docs/export.md has
    every column.

    Exit code 0 if there are rows, 1 if nothing matched (then no file is written).

    Examples:

        whetstone export sft --min-reward 1 --to sft.jsonl
        whetstone export preferences --min-gap 0.5 --to pairs.parquet
        whetstone export trajectories --ids --where "reward > 0.5 AND task = 'x'" --to good.parquet
        whetstone export ratings --to ratings.csv
    """
    # Options that this kind of row would ignore.
    check(
        {
            "--ids goes with trajectories": ids and kind != "trajectories",
            "--source goes with sft": source != "both" and kind != "sft",
            "--min-gap and --pairs go with preferences": (min_gap > 0 or pairs != "best") and kind != "preferences",
            "--min-reward goes with trajectories and sft": min_reward is not None
            and kind in ("preferences", "ratings"),
            "--include does not go with ratings: nothing is left out of them": bool(include) and kind == "ratings",
        }
    )
    files.check(to, kind, overwrite=overwrite)
    settings = running_settings(data, config)
    own = settings.of_project(project) if project else settings.of_policy(policy)
    upgrade(database_of(settings))
    included = frozenset(one.value for one in include or ()) | ({"eval"} if split == "eval" else frozenset())
    options = ExportOptions(
        kind, Filter(own.project, policy, split, task, where, query), included, ids, min_reward, source, min_gap,
        pairs == "all", limit,
    )  # fmt: skip
    tally = _run(settings.database_url, options, to)
    size = Path(to).stat().st_size if tally.rows and to != files.STDOUT else None
    if as_json:
        summary = {"file": to, "kind": kind, "rows": tally.rows, "bytes": size, "left_out": dict(tally.left_out)}
        # On stderr if the rows go to stdout.
        typer.echo(msgspec.json.encode(summary).decode(), err=to == files.STDOUT)
    else:
        _print_summary(tally, to, size)
    raise typer.Exit(0 if tally.rows else 1)


def _run(url: str, options: ExportOptions, to: str) -> Tally:
    """Write the file; without any row, no file is created."""
    with (
        errors.status("reading") as status,
        suppress(_NothingMatched),
        files.opened(to, options.kind, ids=options.ids) as rows,
    ):
        tally = run(url, options, rows, lambda count: status.update(f"{count:,} rows"))
        if not tally.rows:
            raise _NothingMatched
    return tally


class _NothingMatched(Exception):
    """There are no rows."""


def _print_summary(tally: Tally, to: str, size: int | None) -> None:
    # stdout may contain the rows.
    out = errors if to == files.STDOUT else console
    with_size = "" if size is None else f", {files.format_size(size)}"
    nothing = "nothing to write: no row came of what the filter matches"
    summary = f"{tally.rows:,} rows in {escape(to)}{with_size}" if tally.rows else nothing
    out.print(summary, highlight=False, soft_wrap=True)
    for why, count in tally.left_out.most_common():
        out.print(f"  left out: {count:,} {why.value} ({why.meaning})", style="dim", highlight=False, soft_wrap=True)
