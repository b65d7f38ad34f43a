"""Feedback that is a comment alone, and steps that learn from preferences or words: what columns may now contain."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

COMMENTS = {
    ("feedback", "source"): "P, J: reward | thumbs | parts | demonstration | comment | judge | end | close",
    ("steps", "kind"): "T: grpo | kto | dpo | hindsight | sft; NULL of steps before there were two",
    ("steps", "loss_function"): "T: dppo_tv | cispo | dapo | grpo | dr_grpo | gspo | kto | dpo | divergence | nll",
    ("steps", "imitates"): "T: {from, min_reward, limit} of a step that learns from answers or words; else NULL",
    (
        "examples",
        "source_id",
    ): "T: the feedback or completion it was made of; of steps that learn from words `/hindsight` follows",
    ("examples", "source"): "T: demonstrations | best | the policy that answered | comments",
}


def upgrade() -> None:
    """Change the comments of these columns; SQLite keeps none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for (table, column), comment in COMMENTS.items():
        kind = sa.JSON if column == "imitates" else sa.Text
        op.alter_column(table, column, existing_type=kind, comment=comment)
