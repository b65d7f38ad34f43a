"""The roll-ups of the first release: their tables, triggers and views. Frozen: a later revision brings its own text.

For each of `trajectories`, `completions` and `feedback` there are two tables of the same columns: `*_hours` has sums by
the hour, `*_changes` has notes of what changed since. A trigger writes a note in the transaction that changes a row:
first what the row counted for before, with a minus, then what it counts for now. So programs of any version can write
rows without knowing about roll-ups. The judging worker adds the notes to the hours (`judge.maintenance.rollups`). The
views read both tables, so they are exact at any time.

A note must never make a write fail. A trigger copies values, compares them with bounds and inserts a row that nobody
else writes; it touches no row that another transaction may hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic import op

LARGEST = "1e6"
"""A reward beyond it, either way, is counted but is in no sum: its square would drown all others."""
NO_VERSION = -1
SEQUENCE = "changes_id"
"""PostgreSQL's numbers of notes."""

_WITHIN = f"{{r}}.reward BETWEEN -{LARGEST} AND {LARGEST}"
# PostgreSQL refuses a product that comes to 0, and a trigger must not make a write fail.
_SQUARED = f"{_WITHIN} AND NOT {{r}}.reward BETWEEN -1e-150 AND 1e-150"
_FLAG = "CASE WHEN {when} THEN 1 ELSE 0 END"
_HOUR = {
    "sqlite": "substr({r}.created_at, 1, 13) || ':00'",
    "postgresql": "to_char({r}.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:00')",
}
_REASON = {
    "sqlite": (
        "CASE WHEN instr({r}.why_not_trained, ':') > 0 "
        "THEN substr({r}.why_not_trained, 1, instr({r}.why_not_trained, ':') - 1) "
        "ELSE coalesce({r}.why_not_trained, '') END"
    ),
    "postgresql": "coalesce(split_part({r}.why_not_trained, ':', 1), '')",
}
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


@dataclass(frozen=True)
class RollupColumn:
    """A key or a measure of a roll-up."""

    name: str
    value: str
    """SQL: what the row `{r}` has there or adds to it; `{hour}` and `{reason}` stand for each database's own words."""
    comment: str
    type: type[sa.types.TypeEngine[Any]] = sa.Integer


@dataclass(frozen=True)
class Rollup:
    """A table whose rows are counted by the hour in which they began."""

    table: str
    kind: str
    """What its own tables and triggers are named after."""
    keys: tuple[RollupColumn, ...]
    measures: tuple[RollupColumn, ...]
    watched: tuple[str, ...]
    """The row's columns that all this is made of."""
    view: str
    """The view's columns; `{h}` is the table that they come from."""
    indexed: tuple[str, ...] = ()
    """Columns of an index on the hours."""

    @property
    def hours(self) -> str:
        """The table of sums."""
        return f"{self.kind}_hours"

    @property
    def changes(self) -> str:
        """The table of notes."""
        return f"{self.kind}_changes"


TRAJECTORIES = Rollup(
    table="trajectories",
    kind="trajectory",
    keys=(
        RollupColumn("policy", "{r}.policy", "policy of the trajectory's first completion", sa.Text),
        RollupColumn("hour", "{hour}", "UTC, YYYY-MM-DD HH:00, in which it began", sa.Text),
        RollupColumn(
            "version",
            f"coalesce({{r}}.first_version, {NO_VERSION})",
            "the version that spoke first; -1 where none did",
        ),
        RollupColumn("split", "{r}.split", "train | eval", sa.Text),
        RollupColumn("state", "{r}.state", "the trajectory's, as it is now", sa.Text),
        RollupColumn(
            "why_not_trained",
            "{reason}",
            "likewise, without the name behind a reason; empty where it has none",
            sa.Text,
        ),
    ),
    measures=(
        RollupColumn("trajectories", "1", "how many"),
        RollupColumn("ended", _FLAG.format(when="{r}.ended_at IS NOT NULL"), "those that are over"),
        RollupColumn("grouped", _FLAG.format(when="{r}.group_id IS NOT NULL"), "those that belong to a group"),
        RollupColumn("rewarded", _FLAG.format(when=_WITHIN), "those with a reward from -1e6 to 1e6"),
        RollupColumn(
            "off_scale",
            _FLAG.format(when=f"{{r}}.reward IS NOT NULL AND NOT {_WITHIN}"),
            "those with a reward beyond, which is in no sum",
        ),
        RollupColumn("reward_sum", f"CASE WHEN {_WITHIN} THEN {{r}}.reward ELSE 0 END", "of the rewards", sa.Float),
        RollupColumn(
            "reward_squares",
            f"CASE WHEN {_SQUARED} THEN {{r}}.reward * {{r}}.reward ELSE 0 END",
            "sum of the rewards' squares",
            sa.Float,
        ),
    ),
    watched=(
        "project", "policy", "created_at", "first_version", "split", "state", "why_not_trained", "ended_at",
        "group_id", "reward",
    ),
    # Whether its policy trains is not the trajectory's to remember, as in admin_trajectories.
    view=f"""
        {{h}}.project, {{h}}.policy, NULLIF({{h}}.version, {NO_VERSION}) AS version, {{h}}.hour,
        substr({{h}}.hour, 1, 10) AS day, {{h}}.split, {{h}}.state,
        CASE WHEN {{h}}.why_not_trained = 'waiting_step' AND (
                SELECT p.state FROM policies AS p WHERE p.project = {{h}}.project AND p.id = {{h}}.policy
            ) <> 'training' THEN 'policy_not_training'
            ELSE NULLIF({{h}}.why_not_trained, '') END AS why_not_trained,
        {{h}}.trajectories, {{h}}.ended, {{h}}.grouped, {{h}}.rewarded, {{h}}.off_scale, {{h}}.reward_sum,
        {{h}}.reward_squares
    """,
    indexed=("project", "policy", "version"),
)  # fmt: skip
COMPLETIONS = Rollup(
    table="completions",
    kind="completion",
    keys=(
        RollupColumn("hour", "{hour}", "UTC, YYYY-MM-DD HH:00, in which the request arrived", sa.Text),
        RollupColumn("policy", "{r}.policy", "the policy that spoke", sa.Text),
        RollupColumn("version", "{r}.policy_version", "the version that spoke"),
        RollupColumn("key_id", "coalesce({r}.key_id, '')", "the API key that asked; empty without keys", sa.Text),
        RollupColumn("status", "{r}.status", "complete | aborted | error", sa.Text),
    ),
    measures=(
        RollupColumn("completions", "1", "how many"),
        RollupColumn("prompt_tokens", "coalesce({r}.prompt_tokens, 0)", "sum over whole prompts", sa.BigInteger),
        RollupColumn("sampled_tokens", "coalesce({r}.completion_tokens, 0)", "sum", sa.BigInteger),
        RollupColumn(
            "ttft_count",
            _FLAG.format(when="{r}.ttft_ms IS NOT NULL"),
            "those that were streamed to a first event",
        ),
        RollupColumn(
            "ttft_ms",
            "coalesce({r}.ttft_ms, 0)",
            "sum of their milliseconds from request to first event",
            sa.Float,
        ),
        RollupColumn("total_count", _FLAG.format(when="{r}.total_ms IS NOT NULL"), "those whose last byte was sent"),
        RollupColumn(
            "total_ms",
            "coalesce({r}.total_ms, 0)",
            "sum of their milliseconds from request to last byte",
            sa.Float,
        ),
    ),
    watched=(
        "project", "created_at", "policy", "policy_version", "key_id", "status", "prompt_tokens", "completion_tokens",
        "ttft_ms", "total_ms",
    ),
    view="""
        {h}.project, {h}.hour, substr({h}.hour, 1, 10) AS day, {h}.policy, {h}.version,
        NULLIF({h}.key_id, '') AS key_id, {h}.status, {h}.completions, {h}.prompt_tokens, {h}.sampled_tokens,
        {h}.ttft_count, {h}.ttft_ms, {h}.total_count, {h}.total_ms
    """,
)  # fmt: skip
FEEDBACK = Rollup(
    table="feedback",
    kind="feedback",
    keys=(
        RollupColumn("hour", "{hour}", "UTC, YYYY-MM-DD HH:00, in which it came", sa.Text),
        RollupColumn("source", "{r}.source", "reward | thumbs | parts | demonstration | judge | end | close", sa.Text),
        RollupColumn("state", "{r}.state", "the feedback's, as it is now", sa.Text),
    ),
    measures=(
        RollupColumn("feedback", "1", "how many"),
        RollupColumn("rewarded", _FLAG.format(when=_WITHIN), "those with a reward from -1e6 to 1e6"),
        RollupColumn("reward_sum", f"CASE WHEN {_WITHIN} THEN {{r}}.reward ELSE 0 END", "of the rewards", sa.Float),
    ),
    watched=("project", "created_at", "source", "state", "reward"),
    view="""
        {h}.project, {h}.hour, substr({h}.hour, 1, 10) AS day, {h}.source, {h}.state, {h}.feedback, {h}.rewarded,
        {h}.reward_sum
    """,
)
ROLLUPS = (TRAJECTORIES, COMPLETIONS, FEEDBACK)


def create_tables() -> None:
    """Create the tables of sums and of notes."""
    writers = "P, J, T, W"
    for of in ROLLUPS:
        index = [sa.Index(f"ix_{of.hours}_{'_'.join(of.indexed)}", *of.indexed)] if of.indexed else []
        op.create_table(
            of.hours,
            *_columns("J", of),
            sa.PrimaryKeyConstraint("project", *(key.name for key in of.keys), name=f"pk_{of.hours}"),
            *index,
            comment=f"{of.table} by the hour, for dashboards",
        )
        op.create_table(
            of.changes,
            sa.Column(
                "id", _NUMBER, nullable=False, autoincrement=False, comment=f"{writers}: later than all before it"
            ),
            *_columns(writers, of),
            # Without the project: on SQLite a number alone is the row's own, and needs no index beside the table.
            sa.PrimaryKeyConstraint("id", name=f"pk_{of.changes}"),
            comment=f"what changed of {of.table} and is not in {of.hours} yet; triggers write it",
        )


def _columns(writers: str, of: Rollup) -> Iterator[sa.Column[Any]]:
    yield sa.Column("project", sa.Text, nullable=False, comment=f"{writers}: the tenant")
    for column in (*of.keys, *of.measures):
        yield sa.Column(column.name, column.type, nullable=False, comment=f"{writers}: {column.comment}")


def statements(dialect: str) -> list[str]:
    """Return what creates triggers and views on them."""
    made = [f"CREATE SEQUENCE {SEQUENCE}"] if dialect == "postgresql" else []
    for of in ROLLUPS:
        made += _sqlite_triggers(of) if dialect == "sqlite" else _postgresql_triggers(of)
        both = (f"SELECT {of.view.format(h='h')} FROM {table} AS h" for table in (of.hours, of.changes))
        made.append(f"CREATE VIEW admin_{of.hours} AS {' UNION ALL '.join(both)}")
    return made


def _sqlite_triggers(of: Rollup) -> list[str]:
    def on(when: str, event: str, *notes: str) -> str:
        return f"CREATE TRIGGER {of.changes}_{when} AFTER {event} ON {of.table} {' '.join(notes)}; END"

    changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in of.watched)
    old, new = _note("sqlite", of, "OLD", -1), _note("sqlite", of, "NEW", 1)
    return [
        on("insert", "INSERT", "BEGIN", new),
        on("delete", "DELETE", "BEGIN", old),
        on("update", f"UPDATE OF {', '.join(of.watched)}", f"WHEN {changed} BEGIN", f"{old};", new),
    ]


def _postgresql_triggers(of: Rollup) -> list[str]:
    changed = " OR ".join(f"OLD.{column} IS DISTINCT FROM NEW.{column}" for column in of.watched)
    old, new = _note("postgresql", of, "OLD", -1), _note("postgresql", of, "NEW", 1)
    run = f"EXECUTE FUNCTION note_{of.changes}()"
    function = f"""
        CREATE FUNCTION note_{of.changes}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP <> 'INSERT' THEN {old}; END IF;
            IF TG_OP <> 'DELETE' THEN {new}; END IF;
            RETURN NULL;
        END $$
    """
    return [
        function,
        f"CREATE TRIGGER {of.changes}_insert AFTER INSERT ON {of.table} FOR EACH ROW {run}",
        f"CREATE TRIGGER {of.changes}_delete AFTER DELETE ON {of.table} FOR EACH ROW {run}",
        f"CREATE TRIGGER {of.changes}_update AFTER UPDATE OF {', '.join(of.watched)} ON {of.table} "
        f"FOR EACH ROW WHEN ({changed}) {run}",
    ]


def _note(dialect: str, of: Rollup, row: str, sign: int) -> str:
    """Return the statement that notes what `row` (OLD or NEW) counts for."""
    # SQLite gives a row whose number is NULL the one after the largest.
    number = "NULL" if dialect == "sqlite" else f"nextval('{SEQUENCE}')"
    keys = [_value(dialect, key, row) for key in of.keys]
    measures = [f"{sign} * ({_value(dialect, measure, row)})" for measure in of.measures]
    names = ", ".join(column.name for column in (*of.keys, *of.measures))
    return (
        f"INSERT INTO {of.changes} (project, id, {names}) "
        f"VALUES ({', '.join([f'{row}.project', number, *keys, *measures])})"
    )


def _value(dialect: str, column: RollupColumn, row: str) -> str:
    return column.value.replace("{hour}", _HOUR[dialect]).replace("{reason}", _REASON[dialect]).format(r=row)
