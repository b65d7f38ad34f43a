"""A policy that takes over from a model of another server: its share, and the decisions on it."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views
from whetstone.database.types import Utc

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

COLUMNS = (
    ("handover_teacher", sa.Text, "W: the policy that answers until this one is as good; NULL without one"),
    ("handover_share", sa.Float, "W, T: share of new trajectories that this policy answers meanwhile"),
    ("handover_since", Utc, "W, T: since when it answers this share"),
)
COMMENTS = {
    "test": "T, P, W: probe | retention | heldout | canary | watch | handover | hand",
    "decision": "T, P, W: pass | reject | testing | promote | rollback | pin | unpin | begin | raise | lower | stay",
}


def upgrade() -> None:
    """Add the columns, show them at the end of `admin_policies`, and change the comments of others."""
    for name, kind, comment in COLUMNS:
        op.add_column("policies", sa.Column(name, kind(), comment=comment))
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":  # SQLite keeps no comments
        for name, comment in COMMENTS.items():
            op.alter_column("gate_results", name, existing_type=sa.Text, comment=comment)
    added = ", ".join(name for name, _, _ in COLUMNS)
    for statement in initial_views.extended(dialect, "admin_policies", "created_at", added):
        op.execute(sa.text(statement))
