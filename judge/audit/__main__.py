"""Show how good judges are and what they do (`python -m judge.audit`, started by `whetstone judge`). Read-only.

Exit codes: 0 done; 1 there is nothing to compare; 2 it could not begin, or `--fail-on-alarm` and there is an alarm.
"""

import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import rich.table
import typer
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from judge.audit import report as formatting
from judge.audit import store
from judge.audit.calibrate import Calibration, calibrations
from judge.audit.hacking_signs import RankedGroup, drifted, hacked, repetition
from judge.audit.references import NoReferences, from_file
from migrations.run import MigrationError, upgrade
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.terminal.fitting import Fitting

CODE = "code:"
MOST_READ = 400
"""Groups of a policy whose texts are checked for repetition, evenly spread over time."""

app = typer.Typer(
    help="How good judges are, and what they do.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
errors = Console(stderr=True)

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder of database, adapters and logs [data]")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file [whetstone.toml, if it is there]")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="One policy [all]")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object")]


@app.command()
def calibrate(
    policy: PolicyOption = None,
    judge: Annotated[str | None, typer.Option("--judge", help="One judge, by its name in the settings [all]")] = None,
    against: Annotated[
        str, typer.Option("--against", help="feedback; `code:<name>`, a reward function's number; or a .jsonl or .csv")
    ] = "feedback",
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="Least reward of a good attempt, for the AUC [the median]")
    ] = None,
    days: Annotated[int | None, typer.Option("--days", min=1, help="Judgements of so many days [all]")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write report.md and pictures to")] = None,
    as_json: JsonOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Compare judges' scores with the rewards that people, apps or rules gave the same attempts.

    Exit code 1 where there is nothing to compare.

    Example:

        whetstone judge calibrate --against feedback --days 30
    """
    with _opened(data, config) as (settings, connection):
        scope = _scope(connection, settings, policy, days, judge)
        judgements = list(store.judgements(connection, scope))
        groups, by = len({one.group_id for one in judgements}), f" by {judge!r}" if judge is not None else ""
        if not groups:
            raise NoReferences(
                f"no judgement{by} is stored; name judges in [learning.<policy>.ruler], or have a group ranked: "
                'POST /v1/feedback {"group_id": …, "judge": {"kind": "ruler"}}'
            )
        references = _references(connection, scope, against)
        calibrated = calibrations(judgements, references, store.days(connection, scope), threshold)
    if not any(one.groups for one in calibrated):
        raise NoReferences(
            f"{groups} groups were judged, and of none two attempts have a reward from {against}; post feedback on "
            "some (ruler.review_share draws attempts for people to look at: SELECT * FROM admin_reviews), or compare "
            "with a reward function or a file: --against code:<name>, --against rewards.jsonl"
        )
    sentences = [sentence for one in calibrated for sentence in formatting.verdicts(one)]
    if as_json:
        _print_json({"against": against, "calibrations": calibrated, "verdicts": sentences})
    else:
        for one in calibrated:
            _print(formatting.table(one))
        console.print(escape("\n".join(sentences)), highlight=False, soft_wrap=True)
    if out is not None:
        _write(out, calibrated, sentences, against)


@app.command()
def report(
    policy: PolicyOption = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How far to look back")] = 30,
    fail_on_alarm: Annotated[bool, typer.Option("--fail-on-alarm", help="Exit code 2 if there is an alarm")] = False,
    as_json: JsonOption = False,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what judging costs, which groups wait for it, its noise and drift, and signs of reward hacking.

    Example:

        whetstone judge report --days 7 --fail-on-alarm
    """
    with _opened(data, config) as (settings, connection):
        scope = _scope(connection, settings, policy, days)
        drift = store.drift(connection, scope)
        ranked = store.ranked(connection, scope)
        costs, waiting = store.days(connection, scope), store.waiting(connection, scope)
        alarms = [*drifted(drift), *hacked(seen(connection, settings.project, ranked))]
    if as_json:
        _print_json({"days": costs, "waiting": waiting, "ranked": ranked, "drift": drift, "alarms": alarms})
    else:
        _print(formatting.days_table(costs))
        _print(formatting.waiting_table(waiting))
        _print(formatting.noise_table(ranked))
        _print(formatting.drift_table(drift))
        sentences = formatting.alarmed(alarms, ranked=len(ranked))
        console.print(escape("\n".join(sentences)), highlight=False, soft_wrap=True)
    raise typer.Exit(2 if alarms and fail_on_alarm else 0)


def seen(connection: Connection, project: str, ranked: Sequence[RankedGroup]) -> list[RankedGroup]:
    """Return the groups with their repetition. Of a policy with more than 400 groups the texts of 400 are read."""
    of_policy: dict[str, list[str]] = {}
    for one in ranked:
        of_policy.setdefault(one.policy, []).append(one.id)
    read = [one for ids in of_policy.values() for one in ids[:: -(-len(ids) // MOST_READ)]]
    shares: dict[str, list[float]] = {one.id: [] for one in ranked}
    for (group_id, _), texts in itertools.groupby(store.texts(connection, project, read), key=lambda one: one[:2]):
        if (share := repetition("\n".join(text for *_, text in texts))) is not None:
            shares[group_id].append(share)
    return [replace(one, repetition=statistics.fmean(shares[one.id]) if shares[one.id] else None) for one in ranked]


def _references(connection: Connection, scope: store.Scope, against: str) -> Mapping[str, store.Reference]:
    if against == "feedback":
        return store.by_feedback(connection, scope)
    if not against.startswith(CODE):
        return from_file(Path(against))
    calibrated, names = store.by_code(connection, scope, against.removeprefix(CODE))
    if not calibrated:
        there = f"there are: {', '.join(sorted(names))}" if names else "none has scored a judged group"
        raise NoReferences(f"no reward function gave {against.removeprefix(CODE)!r}; {there}")
    return calibrated


@contextmanager
def _opened(data: Path | None, config: Path | None) -> Iterator[tuple[Settings, Connection]]:
    """Load the settings, and open their database for reading."""
    settings = load(config, data=data)
    if settings.database is None and not (settings.data / "whetstone.db").exists():
        raise SettingsError(f"there is no database in {settings.data}; start the stack with `whetstone up` first")
    upgrade(settings.database_url)
    engine = connect(settings.database_url)
    try:
        with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            yield settings, connection
    finally:
        engine.dispose()


def _scope(
    connection: Connection, settings: Settings, policy: str | None, days: int | None, judge: str | None = None
) -> store.Scope:
    there = store.policies(connection, settings.project)
    if policy is not None and policy not in there:
        raise SettingsError(f"no policy is named {policy!r}; there are: {', '.join(there) or 'none'}")
    since = None if days is None else datetime.now(UTC) - timedelta(days=days)
    return store.Scope(settings.project, policy, judge, since)


def _print_json(value: Mapping[str, object]) -> None:
    typer.echo(msgspec.json.encode(value).decode())


def _print(table: formatting.Table) -> None:
    if not table.rows:
        console.print(f"{escape(table.title)}: none", style="dim", highlight=False)
        return
    shown = rich.table.Table(*table.columns, title=escape(table.title), title_justify="left")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print(Fitting(shown))


def _write(out: Path, calibrated: Sequence[Calibration], sentences: Sequence[str], against: str) -> None:
    pictures: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            pictures = [path for one in calibrated if one.groups for path in formatting.draw(out, one)]
        except formatting.NoMatplotlib as error:
            errors.print(escape(str(error)), highlight=False, soft_wrap=True)
        paragraphs = (
            f"# Judges against {against}\n",
            *(f"- {one}" for one in sentences),
            "",
            *(formatting.table(one).markdown() for one in calibrated),
            *(f"![{path.stem}]({path.name})" for path in pictures),
            "",
        )
        (out / "report.md").write_text("\n".join(paragraphs), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error}") from error
    # stdout may have JSON.
    errors.print(
        f"written: {escape(str(out / 'report.md'))} and {len(pictures)} pictures", highlight=False, soft_wrap=True
    )


def main() -> None:
    """Run the command line. Print errors that the user can fix as a message, without a traceback."""
    try:
        app(prog_name="whetstone judge")
    except (NoReferences, SettingsError, MigrationError, SQLAlchemyError) as error:
        errors.print(f"[red]whetstone:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1 if isinstance(error, NoReferences) else 2)


if __name__ == "__main__":
    main()
