"""What constraints decided in a step."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

ADDED = "decided_share, support_disagreements"


def upgrade() -> None:
    """Add the columns, and show them at the end of `admin_steps`."""
    op.add_column(
        "steps",
        sa.Column(
            "decided_share",
            sa.Float,
            comment="T: share of its sampled tokens that constraints decided; NULL where nothing constrained them",
        ),
    )
    op.add_column(
        "steps",
        sa.Column(
            "support_disagreements",
            sa.Integer,
            comment="T: sampled tokens outside of what the trainer finds that a truncation allowed; NULL where nothing "
            "constrained them",
        ),
    )
    for statement in initial_views.extended(op.get_bind().dialect.name, "admin_steps", "ended_at", ADDED):
        op.execute(sa.text(statement))
