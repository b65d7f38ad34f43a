"""A test of the gate, retention, and steps that learn from a teacher: what columns may now contain."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

COMMENTS = {
    ("gate_results", "test"): "T, P: probe | retention | heldout | canary | watch | hand",
    ("steps", "kind"): "T: grpo | kto | dpo | hindsight | distill | sft; NULL where there was but one",
    ("steps", "imitates"): "T: {from, min_reward, limit} of a step on answers, words or a teacher; else NULL",
    (
        "examples",
        "source_id",
    ): "T: the feedback or completion it was made of; `/hindsight` or `/distill/<teacher>` follows by kind",
    ("examples", "source"): "T: demonstrations | best | comments, or the name of the policy or teacher",
}


def upgrade() -> None:
    """Change the comments of these columns; SQLite keeps none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for (table, column), comment in COMMENTS.items():
        kind = sa.JSON if column == "imitates" else sa.Text
        op.alter_column(table, column, existing_type=kind, comment=comment)
