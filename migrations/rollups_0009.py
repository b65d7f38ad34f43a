"""Roll-ups as revision 0009 makes them: what a row counts for, the triggers that note it, the views. Frozen.

A trigger notes each change of a row in the row's own transaction: what it counted for before goes, what it counts for
now comes. Nobody who writes rows has to know of it, whatever version of Whetstone they are. The judging worker puts the
notes together with the hours they belong to (`judge.maintenance.rollups`); the views read both, so they are exact.

A note must never be what makes a write fail: it copies, compares with bounds, and inserts a row that nobody else
writes; all sums are the worker's. No statement of a trigger touches a row that another transaction may hold.
"""

from dataclasses import dataclass

LARGEST = "1e6"
"""A reward beyond it, either way, is counted and in no sum: its square would drown all others for good."""
NO_VERSION = -1

_WITHIN = f"{{r}}.reward BETWEEN -{LARGEST} AND {LARGEST}"
# PostgreSQL refuses a product that comes to 0, and a trigger must not be what makes a write fail.
_SQUARED = f"{_WITHIN} AND NOT {{r}}.reward BETWEEN -1e-150 AND 1e-150"
_FLAG = "CASE WHEN {when} THEN 1 ELSE 0 END"
HOURS = {
    "sqlite": "substr({r}.created_at, 1, 13) || ':00'",
    "postgresql": "to_char({r}.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:00')",
}
REASONS = {
    "sqlite": (
        "CASE WHEN instr({r}.why_not_trained, ':') > 0 "
        "THEN substr({r}.why_not_trained, 1, instr({r}.why_not_trained, ':') - 1) "
        "ELSE coalesce({r}.why_not_trained, '') END"
    ),
    "postgresql": "coalesce(split_part({r}.why_not_trained, ':', 1), '')",
}


@dataclass(frozen=True)
class Counted:
    """A table whose rows are counted by the hour in which they began."""

    table: str
    hours: str
    """The table of what was put together."""
    changes: str
    """The table of notes."""
    keys: dict[str, str]
    """Column -> what it is of a row `{r}`; `{hour}` and `{reason}` are each database's own words."""
    measures: dict[str, str]
    """Column -> what a row adds to it."""
    watched: tuple[str, ...]
    """The row's columns that all this is made of."""
    shown: str
    """The view's columns; `{h}` is where they come from."""


TRAJECTORIES = Counted(
    table="trajectories",
    hours="trajectory_hours",
    changes="trajectory_changes",
    keys={
        "policy": "{r}.policy",
        "hour": "{hour}",
        "version": f"coalesce({{r}}.first_version, {NO_VERSION})",
        "split": "{r}.split",
        "state": "{r}.state",
        "why_not_trained": "{reason}",
    },
    measures={
        "trajectories": "1",
        "ended": _FLAG.format(when="{r}.ended_at IS NOT NULL"),
        "grouped": _FLAG.format(when="{r}.group_id IS NOT NULL"),
        "rewarded": _FLAG.format(when=_WITHIN),
        "off_scale": _FLAG.format(when=f"{{r}}.reward IS NOT NULL AND NOT {_WITHIN}"),
        "reward_sum": f"CASE WHEN {_WITHIN} THEN {{r}}.reward ELSE 0 END",
        "reward_squares": f"CASE WHEN {_SQUARED} THEN {{r}}.reward * {{r}}.reward ELSE 0 END",
    },
    watched=(
        "project", "policy", "created_at", "first_version", "split", "state", "why_not_trained", "ended_at",
        "group_id", "reward",
    ),
    # Whether its policy trains is not the trajectory's to remember, as in admin_trajectories.
    shown=f"""
        {{h}}.project, {{h}}.policy, NULLIF({{h}}.version, {NO_VERSION}) AS version, {{h}}.hour,
        substr({{h}}.hour, 1, 10) AS day, {{h}}.split, {{h}}.state,
        CASE WHEN {{h}}.why_not_trained = 'waiting_step' AND (
                SELECT p.state FROM policies AS p WHERE p.project = {{h}}.project AND p.id = {{h}}.policy
            ) <> 'training' THEN 'policy_not_training'
            ELSE NULLIF({{h}}.why_not_trained, '') END AS why_not_trained,
        {{h}}.trajectories, {{h}}.ended, {{h}}.grouped, {{h}}.rewarded, {{h}}.off_scale, {{h}}.reward_sum,
        {{h}}.reward_squares
    """,
)  # fmt: skip
COMPLETIONS = Counted(
    table="completions",
    hours="completion_hours",
    changes="completion_changes",
    keys={
        "hour": "{hour}",
        "policy": "{r}.policy",
        "version": "{r}.policy_version",
        "key_id": "coalesce({r}.key_id, '')",
        "status": "{r}.status",
    },
    measures={
        "completions": "1",
        "prompt_tokens": "coalesce({r}.prompt_tokens, 0)",
        "sampled_tokens": "coalesce({r}.completion_tokens, 0)",
        "ttft_count": _FLAG.format(when="{r}.ttft_ms IS NOT NULL"),
        "ttft_ms": "coalesce({r}.ttft_ms, 0)",
        "total_count": _FLAG.format(when="{r}.total_ms IS NOT NULL"),
        "total_ms": "coalesce({r}.total_ms, 0)",
    },
    watched=(
        "project", "created_at", "policy", "policy_version", "key_id", "status", "prompt_tokens", "completion_tokens",
        "ttft_ms", "total_ms",
    ),
    shown="""
        {h}.project, {h}.hour, substr({h}.hour, 1, 10) AS day, {h}.policy, {h}.version,
        NULLIF({h}.key_id, '') AS key_id, {h}.status, {h}.completions, {h}.prompt_tokens, {h}.sampled_tokens,
        {h}.ttft_count, {h}.ttft_ms, {h}.total_count, {h}.total_ms
    """,
)  # fmt: skip
FEEDBACK = Counted(
    table="feedback",
    hours="feedback_hours",
    changes="feedback_changes",
    keys={"hour": "{hour}", "source": "{r}.source", "state": "{r}.state"},
    measures={
        "feedback": "1",
        "rewarded": _FLAG.format(when=_WITHIN),
        "reward_sum": f"CASE WHEN {_WITHIN} THEN {{r}}.reward ELSE 0 END",
    },
    watched=("project", "created_at", "source", "state", "reward"),
    shown="""
        {h}.project, {h}.hour, substr({h}.hour, 1, 10) AS day, {h}.source, {h}.state, {h}.feedback, {h}.rewarded,
        {h}.reward_sum
    """,
)
COUNTED = (TRAJECTORIES, COMPLETIONS, FEEDBACK)
SEQUENCE = "changes_id"
"""PostgreSQL's numbers of notes."""


def filling(dialect: str, of: Counted) -> str:
    """Counts what is there already."""
    keys = ["r.project", *(_told(dialect, how, "r") for how in of.keys.values())]
    sums = [f"sum({_told(dialect, how, 'r')})" for how in of.measures.values()]
    return (
        f"INSERT INTO {of.hours} (project, {', '.join([*of.keys, *of.measures])}) "
        f"SELECT {', '.join([*keys, *sums])} FROM {of.table} AS r GROUP BY {', '.join(keys)}"
    )


def view(of: Counted) -> str:
    """The query of its view: what was put together, and what was not yet."""
    parts = (f"SELECT {of.shown.format(h='h')} FROM {table} AS h" for table in (of.hours, of.changes))
    return " UNION ALL ".join(parts)


def triggers(dialect: str, of: Counted) -> list[str]:
    """The statements that make them."""
    return _sqlite(of) if dialect == "sqlite" else _postgresql(of)


def no_triggers(dialect: str, of: Counted) -> list[str]:
    """The statements that drop them."""
    if dialect == "sqlite":
        return [f"DROP TRIGGER {of.changes}_{when}" for when in ("insert", "delete", "update")]
    return [
        *(f"DROP TRIGGER {of.changes}_{when} ON {of.table}" for when in ("insert", "delete", "update")),
        f"DROP FUNCTION note_{of.changes}()",
    ]


def _sqlite(of: Counted) -> list[str]:
    def on(when: str, event: str, *notes: str) -> str:
        return f"CREATE TRIGGER {of.changes}_{when} AFTER {event} ON {of.table} {' '.join(notes)}; END"

    changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in of.watched)
    came, went = _note("sqlite", of, "NEW", 1), _note("sqlite", of, "OLD", -1)
    return [
        on("insert", "INSERT", "BEGIN", came),
        on("delete", "DELETE", "BEGIN", went),
        on("update", f"UPDATE OF {', '.join(of.watched)}", f"WHEN {changed} BEGIN", f"{went};", came),
    ]


def _postgresql(of: Counted) -> list[str]:
    changed = " OR ".join(f"OLD.{column} IS DISTINCT FROM NEW.{column}" for column in of.watched)
    went, came = _note("postgresql", of, "OLD", -1), _note("postgresql", of, "NEW", 1)
    function = f"""
        CREATE FUNCTION note_{of.changes}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP <> 'INSERT' THEN {went}; END IF;
            IF TG_OP <> 'DELETE' THEN {came}; END IF;
            RETURN NULL;
        END $$
    """
    run = f"FOR EACH ROW EXECUTE FUNCTION note_{of.changes}()"
    watched = ", ".join(of.watched)
    return [
        function,
        f"CREATE TRIGGER {of.changes}_insert AFTER INSERT ON {of.table} {run}",
        f"CREATE TRIGGER {of.changes}_delete AFTER DELETE ON {of.table} {run}",
        f"CREATE TRIGGER {of.changes}_update AFTER UPDATE OF {watched} ON {of.table} "
        f"FOR EACH ROW WHEN ({changed}) EXECUTE FUNCTION note_{of.changes}()",
    ]


def _note(dialect: str, of: Counted, row: str, sign: int) -> str:
    # SQLite gives a row whose number is NULL the one after the largest.
    number = "NULL" if dialect == "sqlite" else f"nextval('{SEQUENCE}')"
    keys = [_told(dialect, how, row) for how in of.keys.values()]
    measures = [f"{sign} * ({_told(dialect, how, row)})" for how in of.measures.values()]
    return (
        f"INSERT INTO {of.changes} (project, id, {', '.join([*of.keys, *of.measures])}) "
        f"VALUES ({', '.join([f'{row}.project', number, *keys, *measures])})"
    )


def _told(dialect: str, how: str, row: str) -> str:
    return how.replace("{hour}", HOURS[dialect]).replace("{reason}", REASONS[dialect]).format(r=row)
