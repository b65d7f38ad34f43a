"""How much of a step was compared by state."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ADDED = "decided_share, support_disagreements, state_share"


def upgrade() -> None:
    """Add the column, and show it at the end of `admin_steps`."""
    op.add_column(
        "steps",
        sa.Column(
            "state_share",
            sa.Float,
            comment="T: share of its sampled tokens that were compared by state; NULL with the baseline `group`",
        ),
    )
    for statement in initial_views.extended(op.get_bind().dialect.name, "admin_steps", "ended_at", ADDED):
        op.execute(sa.text(statement))
