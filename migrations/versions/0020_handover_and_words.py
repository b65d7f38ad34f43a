"""A policy that takes over from a model of another server, and more sources of words."""

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
    ("gate_results", "test"): "T, P, W: probe | retention | heldout | canary | watch | handover | hand",
    (
        "gate_results",
        "decision",
    ): "T, P, W: pass | reject | testing | promote | rollback | pin | unpin | begin | raise | lower | stay",
    (
        "examples",
        "source",
    ): "T: demonstrations | best | comments | judge | tools | replies, or the name of the policy or teacher",
}


def upgrade() -> None:
    """Add the columns, show them at the end of `admin_policies`, and change the comments of others."""
    for name, kind, comment in COLUMNS:
        op.add_column("policies", sa.Column(name, kind(), comment=comment))
    dialect = op.get_bind().dialect.name
    if dialect == "postgresql":  # SQLite keeps no comments
        for (table, name), comment in COMMENTS.items():
            op.alter_column(table, name, existing_type=sa.Text, comment=comment)
    added = ", ".join(name for name, _, _ in COLUMNS)
    for statement in initial_views.extended(dialect, "admin_policies", "created_at", added):
        op.execute(sa.text(statement))
