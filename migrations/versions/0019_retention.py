"""A test of the gate, retention: what a column may now contain."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the comment of this column; SQLite keeps none."""
    if op.get_bind().dialect.name == "postgresql":
        comment = "T, P: probe | retention | heldout | canary | watch | hand"
        op.alter_column("gate_results", "test", existing_type=sa.Text, comment=comment)
