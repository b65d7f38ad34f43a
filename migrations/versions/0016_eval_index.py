"""An index of held-out attempts by version and prompt."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index. It has no rows of the split `train`, so what apps record for training costs the same.

    The split is one of its columns, so that SQLite need not read the table.
    """
    op.create_index(
        "ix_trajectories_eval",
        "trajectories",
        ["project", "policy", "first_version", "prompt_hash", "created_at", "reward", "split"],
        sqlite_where=sa.text("split = 'eval'"),
        postgresql_where=sa.text("split = 'eval'"),
    )
