"""Sessions of the dashboard: who has signed in, for all proxies to know."""

import sqlalchemy as sa
from alembic import op

from whetstone.database.types import Utc

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "ui_sessions",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant that is looked at"),
        sa.Column("id", sa.Text, primary_key=True, comment="P: hash of the token that the browser holds"),
        sa.Column("key_id", sa.Text, nullable=False, comment="P: the key that signed in; when it ends, so does this"),
        sa.Column("created_at", Utc, nullable=False, comment="P"),
        sa.Column("expires_at", Utc, nullable=False, comment="P: the session ends then"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_ui_sessions_projects"),
        sa.UniqueConstraint("id", name="uq_ui_sessions_id"),
        comment="who has signed in at the dashboard",
    )


def downgrade() -> None:
    """Drop it: everybody signs in again."""
    op.drop_table("ui_sessions")
