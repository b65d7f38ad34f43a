"""What other names, other servers, self-tests and retries leave behind."""

import sqlalchemy as sa
from alembic import op

from migrations.views_0001 import SHARED
from whetstone.database.types import Json, Utc

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = (
    ("policies", "upstream", sa.Text, "W: another server of the settings that answers; NULL where vLLM does"),
    ("policies", "aliases", Json, "W: list of other names that apps may ask for"),
    ("policies", "self_test", Json, "W: what `whetstone doctor` found out about the model"),
    ("policies", "self_tested_at", Utc, "W"),
    (
        "policy_versions",
        "probe_tokens",
        sa.Integer,
        "T, W: tokens sampled to probe it, or vLLM",
    ),
    ("completions", "request_digest", sa.Text, "P: hash of a body not answered whole; its retry is found by it"),
    ("completions", "turn_key", sa.Text, "P: X-Turn-Id or Idempotency-Key; asked again, the answer is the same"),
    ("completions", "reply", sa.LargeBinary, "P: the answer as sent, where turn_key may ask for it again"),
)
INDEXES = {"ix_completions_unanswered": "request_digest", "ix_completions_turn_key": "turn_key"}
COMMENTS = {
    "upstream_id": (
        "P: `chatcmpl-…`, as the app holds it; shared by the choices",
        "P: the answer's id, as the app holds it; shared by the choices",
    ),
    "endpoint": ("P: `chat.completions`", "P: chat.completions | completions | messages | responses"),
}
"""Column of completions: its comment before and after."""

ADMIN_POLICIES = """
    SELECT project, id AS policy, base_model, live_version, state, model_path, upstream, aliases, self_test,
           self_tested_at, created_at
    FROM policies
"""


def upgrade() -> None:
    """Add the columns, then show those of policies."""
    for table, name, kind, comment in COLUMNS:
        op.add_column(table, sa.Column(name, kind, comment=comment))
    for index, column in INDEXES.items():
        kept = sa.text(f"{column} IS NOT NULL")
        op.create_index(index, "completions", ["project", column], sqlite_where=kept, postgresql_where=kept)
    _comment(after=True)
    _show(ADMIN_POLICIES)


def downgrade() -> None:
    """Drop them again, and what they held."""
    _show(SHARED["admin_policies"])
    _comment(after=False)
    for index in INDEXES:
        op.drop_index(index, "completions")
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)


def _show(query: str) -> None:
    op.execute(sa.text("DROP VIEW admin_policies"))
    op.execute(sa.text(f"CREATE VIEW admin_policies AS {query}"))


def _comment(*, after: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        for column, comments in COMMENTS.items():
            op.alter_column("completions", column, comment=comments[after], existing_comment=comments[not after])
