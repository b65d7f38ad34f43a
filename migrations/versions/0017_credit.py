"""Feedback on a completion may be earned there, at that step."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and show it at the end of `admin_feedback`."""
    op.add_column(
        "feedback",
        sa.Column(
            "credit",
            sa.Text,
            comment="P: `step`: earned at this completion, not by the attempt as a whole; else NULL",
        ),
    )
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        op.alter_column(
            "trajectories",
            "reward_source",
            existing_type=sa.Text,
            comment="J: trajectory | completions | steps | group | judge | code | failure: what set it",
        )
    for statement in initial_views.extended(op.get_bind().dialect.name, "admin_feedback", "withdrawn_at", "credit"):
        op.execute(sa.text(statement))
