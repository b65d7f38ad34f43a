"""API keys: what opens the proxy, and how far. Privacy: what was taken out before writing, and what was deleted."""

import sqlalchemy as sa
from alembic import op

from migrations.views_0001 import SHARED
from whetstone.database.types import Json, Utc

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INDEXES = (
    ("ix_completions_retry_of", "completions", ("project", "retry_of"), "retry_of IS NOT NULL"),
    ("ix_feedback_unplaced", "feedback", ("project", "target_id"), "trajectory_id IS NULL"),
    ("ix_examples_project_trajectory_id", "examples", ("project", "trajectory_id"), None),
    ("ix_evaluations_project_source_id", "evaluations", ("project", "source_id"), None),
)
"""Name, table, columns, and the rows it keeps; None: all."""
ADMIN_COMPLETIONS = SHARED["admin_completions"].replace("created_at", "redactions, created_at")
ADMIN_ERASURES = """
    SELECT project, id AS erasure_id, kind, target, asked_at, finished_at, trajectories, completions, versions,
           waits_for
    FROM erasures
"""
ADMIN_KEYS = """
    SELECT project, id AS key_id, name, scopes, created_at, expires_at, revoked_at, last_used_at, requests_per_min,
           tokens_per_min
    FROM api_keys
"""


def upgrade() -> None:
    """Make the tables, and the views; that of keys leaves their hashes out."""
    op.create_table(
        "api_keys",
        sa.Column("project", sa.Text, primary_key=True, comment="W, P: the tenant that it leads to"),
        sa.Column(
            "id", sa.Text, primary_key=True, comment="W, P: 12 of a-z and 0-9, no secret; part of the key's text"
        ),
        sa.Column("name", sa.Text, nullable=False, comment="W, P: what it is for, in words"),
        sa.Column(
            "secret_sha256", sa.Text, nullable=False, comment="W, P: hash of the key's whole text, which nobody keeps"
        ),
        sa.Column(
            "scopes", Json, nullable=False, comment="W, P: list of inference | feedback | admin; admin has them all"
        ),
        sa.Column("created_at", Utc, nullable=False, comment="W, P"),
        sa.Column("expires_at", Utc, comment="W, P: it opens nothing from then on; NULL: it does not end by itself"),
        sa.Column("revoked_at", Utc, comment="W, P: when it was taken back; NULL while it stands"),
        sa.Column(
            "last_used_at", Utc, comment="P: the minute of the last request that came with it; NULL until one has"
        ),
        sa.Column("requests_per_min", sa.Integer, comment="W, P: most requests a minute; NULL: no limit"),
        sa.Column("tokens_per_min", sa.Integer, comment="W, P: most tokens a minute, read and sampled; NULL: no limit"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_api_keys_projects"),
        sa.UniqueConstraint("secret_sha256", name="uq_api_keys_secret_sha256"),
        comment="API keys as hashes: what opens the proxy, and how far",
    )
    op.execute(sa.text(f"CREATE VIEW admin_keys AS {ADMIN_KEYS}"))
    op.add_column(
        "completions",
        sa.Column(
            "redactions",
            sa.Integer,
            comment="P: pieces of its call taken out before writing; NULL where nobody looked",
        ),
    )
    op.create_table(
        "erasures",
        sa.Column("project", sa.Text, primary_key=True, comment="W, P, J: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="W, P, J"),
        sa.Column("kind", sa.Text, nullable=False, comment="W, P, J: trajectory | user | age"),
        sa.Column(
            "target",
            sa.Text,
            nullable=False,
            comment="W, P, J: the trajectory's id; SHA-256 of the user's name; the time before which all goes",
        ),
        sa.Column(
            "asked_at",
            Utc,
            nullable=False,
            comment="W, P, J: what came before then and is not in the tables yet, goes",
        ),
        sa.Column("finished_at", Utc, comment="W, P, J: when nothing of it was left; NULL until then"),
        sa.Column("trajectories", sa.Integer, nullable=False, comment="W, P, J: deleted so far"),
        sa.Column("completions", sa.Integer, nullable=False, comment="W, P, J: deleted so far"),
        sa.Column(
            "versions", Json, nullable=False, comment="W, P, J: {policy: list of versions} that have learned from it"
        ),
        sa.Column("waits_for", Json, comment="W, P, J: list of trajectories that a step has; they go when it is over"),
        comment="what was deleted, when, and who had learned from it",
    )
    op.create_index("ix_erasures_project_target", "erasures", ["project", "target"])
    op.create_index("ix_erasures_asked_at", "erasures", ["asked_at"])
    _index("ix_erasures_unfinished", "erasures", ("project", "asked_at"), "finished_at IS NULL")
    for index in INDEXES:
        _index(*index)
    _show(ADMIN_COMPLETIONS)
    op.execute(sa.text(f"CREATE VIEW admin_erasures AS {ADMIN_ERASURES}"))


def downgrade() -> None:
    """Drop them again, and what they held."""
    op.execute(sa.text("DROP VIEW admin_erasures"))
    # The view first: it would keep the column.
    op.execute(sa.text("DROP VIEW admin_completions"))
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table)
    op.drop_table("erasures")
    op.drop_column("completions", "redactions")
    op.execute(sa.text(f"CREATE VIEW admin_completions AS {SHARED['admin_completions']}"))
    op.execute(sa.text("DROP VIEW admin_keys"))
    op.drop_table("api_keys")


def _show(query: str) -> None:
    op.execute(sa.text("DROP VIEW admin_completions"))
    op.execute(sa.text(f"CREATE VIEW admin_completions AS {query}"))


def _index(name: str, table: str, columns: tuple[str, ...], kept: str | None) -> None:
    where = None if kept is None else sa.text(kept)
    op.create_index(name, table, list(columns), sqlite_where=where, postgresql_where=where)
