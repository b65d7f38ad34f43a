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
    dialect = op.get_bind().dialect.name
    (created,) = (one for one in initial_views.statements(dialect) if one.startswith("CREATE VIEW admin_steps "))
    view = created.replace("ended_at\n        FROM", f"ended_at, {ADDED}\n        FROM")
    if dialect == "sqlite":
        op.execute(sa.text("DROP VIEW admin_steps"))
    else:
        # A view that is replaced keeps its grants, and the views that read it.
        view = view.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1)
    # A colon begins no parameter here.
    op.execute(sa.text(view.replace(":", r"\:")))
