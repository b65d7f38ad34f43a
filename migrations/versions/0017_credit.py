"""Feedback that was earned at a step, and how many of a step's tokens its update rests on."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

OF_STEPS = "decided_share, support_disagreements, state_share, effective_share"


def upgrade() -> None:
    """Add the columns, and show them at the end of `admin_feedback` and `admin_steps`."""
    credit = "P: `step`: earned at this completion, not by the attempt as a whole; else NULL"
    op.add_column("feedback", sa.Column("credit", sa.Text, comment=credit))
    effective = "T: effective sample size of its sampled tokens, as a share of them; NULL where it imitates"
    op.add_column("steps", sa.Column("effective_share", sa.Float, comment=effective))
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":  # SQLite keeps no comments
        op.alter_column(
            "trajectories",
            "reward_source",
            existing_type=sa.Text,
            comment="J: trajectory | completions | steps | group | judge | code | failure: what set it",
        )
    for view, last, added in (("admin_feedback", "withdrawn_at", "credit"), ("admin_steps", "ended_at", OF_STEPS)):
        for statement in initial_views.extended(dialect, view, last, added):
            op.execute(sa.text(statement))
