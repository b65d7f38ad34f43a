"""Roll-ups: what dashboards show, counted by the hour, and indexes for their lists.

What is there is counted here, once; from then on triggers note what changes.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from migrations.rollups_0009 import COUNTED, SEQUENCE, filling, no_triggers, triggers, view

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INDEXES = (
    ("ix_groups_project_created_at", "groups", ("project", "created_at")),
    ("ix_feedback_project_created_at", "feedback", ("project", "created_at")),
)
TENANT = "the tenant"
TRAJECTORY_KEYS = {
    "policy": "policy of the trajectory's first completion",
    "hour": "UTC, YYYY-MM-DD HH:00, in which it began",
    "version": "the version that spoke first; -1 where none did",
    "split": "train | eval",
    "state": "the trajectory's, as it is now",
    "why_not_trained": "likewise, without the name behind a reason; empty where it has none",
}
TRAJECTORY_MEASURES = {
    "trajectories": "how many",
    "ended": "those that are over",
    "grouped": "those that belong to a group",
    "rewarded": "those with a reward from -1e6 to 1e6",
    "off_scale": "those with a reward beyond, which is in no sum",
    "reward_sum": "of the rewards",
    "reward_squares": "sum of the rewards' squares",
}
COMPLETION_KEYS = {
    "hour": "UTC, YYYY-MM-DD HH:00, in which the request arrived",
    "policy": "the policy that spoke",
    "version": "the version that spoke",
    "key_id": "the API key that asked; empty without keys",
    "status": "complete | aborted | error",
}
COMPLETION_MEASURES = {
    "completions": "how many",
    "prompt_tokens": "sum over whole prompts",
    "sampled_tokens": "sum",
    "ttft_count": "those that were streamed to a first event",
    "ttft_ms": "sum of their milliseconds from request to first event",
    "total_count": "those whose last byte was sent",
    "total_ms": "sum of their milliseconds from request to last byte",
}
FEEDBACK_KEYS = {
    "hour": "UTC, YYYY-MM-DD HH:00, in which it came",
    "source": "reward | thumbs | parts | demonstration | judge | end | close",
    "state": "the feedback's, as it is now",
}
FEEDBACK_MEASURES = {
    "feedback": "how many",
    "rewarded": "those with a reward from -1e6 to 1e6",
    "reward_sum": "of the rewards",
}
TABLES = {
    "trajectory": (TRAJECTORY_KEYS, TRAJECTORY_MEASURES, "trajectories"),
    "completion": (COMPLETION_KEYS, COMPLETION_MEASURES, "completions"),
    "feedback": (FEEDBACK_KEYS, FEEDBACK_MEASURES, "feedback"),
}
FRACTIONS = ("reward_sum", "reward_squares", "ttft_ms", "total_ms")
TOKENS = ("prompt_tokens", "sampled_tokens")


def upgrade() -> None:
    """Make the tables, count what there is, and have what comes noted."""
    dialect = op.get_bind().dialect.name
    for name, table, columns in INDEXES:
        op.create_index(name, table, list(columns))
    for kind, (keys, measures, what) in TABLES.items():
        _table(f"{kind}_hours", "J", keys, measures, primary=True, comment=f"{what} by the hour, for dashboards")
        _table(
            f"{kind}_changes",
            "P, J, T, W",
            keys,
            measures,
            primary=False,
            comment=f"what changed of {what} and is not in {kind}_hours yet; triggers write it",
        )
    op.create_index("ix_trajectory_hours_project_policy_version", "trajectory_hours", ["project", "policy", "version"])
    if dialect == "postgresql":
        op.execute(sa.text(f"CREATE SEQUENCE {SEQUENCE}"))
    for of in COUNTED:
        op.execute(_verbatim(filling(dialect, of)))
        for statement in triggers(dialect, of):
            op.execute(_verbatim(statement))
        op.execute(_verbatim(f"CREATE VIEW admin_{of.hours} AS {view(of)}"))


def downgrade() -> None:
    """Drop them again: the figures can be counted anew."""
    dialect = op.get_bind().dialect.name
    for of in COUNTED:
        op.execute(sa.text(f"DROP VIEW admin_{of.hours}"))
        for statement in no_triggers(dialect, of):
            op.execute(sa.text(statement))
        op.drop_table(of.hours)
        op.drop_table(of.changes)
    if dialect == "postgresql":
        op.execute(sa.text(f"DROP SEQUENCE {SEQUENCE}"))
    for name, table, _ in INDEXES:
        op.drop_index(name, table)


def _table(
    name: str, writer: str, keys: dict[str, str], measures: dict[str, str], *, primary: bool, comment: str
) -> None:
    number = sa.Column(
        "id",
        sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        primary_key=True,
        autoincrement=False,
        comment=f"{writer}: later than all before it",
    )
    project = sa.Column("project", sa.Text, primary_key=primary, nullable=False, comment=f"{writer}: {TENANT}")
    columns: list[sa.Column[Any]] = [project] if primary else [number, project]
    for column, told in keys.items():
        kind = sa.Integer if column == "version" else sa.Text
        columns.append(sa.Column(column, kind, primary_key=primary, nullable=False, comment=f"{writer}: {told}"))
    for column, told in measures.items():
        kind_of_sum = sa.Float if column in FRACTIONS else sa.BigInteger if column in TOKENS else sa.Integer
        columns.append(sa.Column(column, kind_of_sum, nullable=False, comment=f"{writer}: {told}"))
    op.create_table(name, *columns, comment=comment)


def _verbatim(statement: str) -> sa.TextClause:
    """A colon in it begins no parameter."""
    return sa.text(statement.replace(":", r"\:"))
