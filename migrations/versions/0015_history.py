"""The hash of a prompt begins the hash by which its answer is found, in place of a column and an index of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Remove the column. What continues a completion from before begins a new trajectory: its history is of another
    form.
    """
    op.drop_index("ix_completions_prompt_history", "completions")
    op.drop_column("completions", "prompt_history")
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        op.alter_column(
            "completions",
            "history",
            existing_type=sa.LargeBinary,
            comment="P: 20 bytes, hashes of the prompt (8) and of prompt and answer; what extends it is found by it, "
            "and what repeats its answer in other words by the first part",
        )
