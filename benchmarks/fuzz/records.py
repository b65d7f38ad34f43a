"""Check the tables after `fuzz`, with any cases. Reads SQL only."""

from collections.abc import Collection, Iterator

from sqlalchemy import Engine, text

from whetstone.domain.states import FeedbackState

FEEDBACK_STATES = tuple(state.value for state in FeedbackState)
NONE_OF = {
    "completions without a trajectory": """
        SELECT c.id FROM completions c LEFT JOIN trajectories t ON t.project = c.project AND t.id = c.trajectory_id
        WHERE t.id IS NULL""",
    "trajectories that count their completions wrongly": """
        SELECT t.id FROM trajectories t WHERE t.completions <> (SELECT count(*) FROM completions c
        WHERE c.project = t.project AND c.trajectory_id = t.id)""",
    "trajectories without a completion": """
        SELECT t.id FROM trajectories t WHERE NOT EXISTS (SELECT 1 FROM completions c
        WHERE c.project = t.project AND c.trajectory_id = t.id)""",
    "trajectories whose group is not there": """
        SELECT t.id FROM trajectories t LEFT JOIN groups g ON g.project = t.project AND g.id = t.group_id
        WHERE t.group_id IS NOT NULL AND g.id IS NULL""",
    "completions that follow what is not there": """
        SELECT c.id FROM completions c LEFT JOIN completions f ON f.project = c.project AND f.id = c.follows
        WHERE c.follows IS NOT NULL AND (f.id IS NULL OR f.trajectory_id <> c.trajectory_id)""",
    "completions with ids but not their logprobs": """
        SELECT c.id FROM completions c WHERE c.why_not_trained IS NULL
        AND (c.token_ids IS NULL OR c.inference_logprobs IS NULL OR c.prompt_tokens IS NULL)""",
    "completions of no known status": """
        SELECT id FROM completions WHERE status NOT IN ('complete', 'aborted', 'error')""",
    "feedback of no known state": f"SELECT id FROM feedback WHERE state NOT IN {FEEDBACK_STATES}",
    "feedback without a target": "SELECT id FROM feedback WHERE target_id IS NULL OR target_id = ''",
}
"""Fault -> a query that returns its rows."""


def wrong_with_records(engine: Engine, calls: Collection[str], feedback: Collection[str]) -> Iterator[str]:
    """Return what does not hold. `calls`: those that the model server answered; `feedback`: accepted feedback."""
    sqlite = {"rows whose parents are not there": "PRAGMA foreign_key_check"}
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        for what, query in (NONE_OF | (sqlite if engine.dialect.name == "sqlite" else {})).items():
            if rows := connection.execute(text(query)).all():
                yield f"{len(rows)} {what}, first {rows[:3]}"
        recorded = set(connection.scalars(text("SELECT call_id FROM completions")))
        taken = set(connection.scalars(text("SELECT id FROM feedback")))
    for name, missing in (("calls", set(calls) - recorded), ("feedbacks", set(feedback) - taken)):
        if missing:
            yield f"{len(missing)} {name} are not in SQL, first {sorted(missing)[:3]}"


def counts(engine: Engine) -> dict[str, int]:
    """Return the number of rows of each table."""
    tables = ("trajectories", "completions", "groups", "feedback")
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        return {table: int(connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0) for table in tables}
