"""Runs of the launcher's command, and a view of them."""

import sqlalchemy as sa
from alembic import op

from whetstone.database.types import Utc

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table and its view."""
    op.create_table(
        "launches",
        sa.Column("project", sa.Text, nullable=False, comment="T: the home project"),
        sa.Column("number", sa.Integer, nullable=False, comment="T: from 1"),
        sa.Column("reason", sa.Text, nullable=False, comment="T: which policy had what to do"),
        sa.Column(
            "steps",
            sa.Integer,
            comment="T: steps of all projects that made a version, or ended without one, while it ran; NULL until then",
        ),
        sa.Column(
            "exit_code", sa.Integer, comment="T: of the command; below 0 the signal that ended it; NULL until then"
        ),
        sa.Column(
            "error", sa.Text, comment="T: why it did not start, how it failed, or that it took no step; else NULL"
        ),
        sa.Column("cost_usd", sa.Float, comment="T: hours times `launcher.usd_per_hour`; NULL where that is not set"),
        sa.Column("created_at", Utc, nullable=False, comment="T: when the command was started"),
        sa.Column("ended_at", Utc, comment="T: when it ended; NULL until then"),
        sa.PrimaryKeyConstraint("project", "number", name="pk_launches"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_launches_projects"),
        comment="runs of the launcher's command, each with its cost",
    )
    op.execute(
        """
        CREATE VIEW admin_launches AS
        SELECT project, number AS launch, reason, steps, exit_code, error, cost_usd, created_at, ended_at
        FROM launches
        """
    )
