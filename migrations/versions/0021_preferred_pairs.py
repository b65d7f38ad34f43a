"""Steps that prefer the better of two answers of another policy, and scores of turns: what columns may contain."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

COMMENTS = {
    ("steps", "kind"): "T: grpo | kto | dpo | hindsight | distill | sft | prefer; NULL where there was one",
    (
        "examples",
        "source_id",
    ): "T: its feedback or completion, and by kind `/hindsight`, `/prefer` or `/distill/<teacher>`",
    (
        "judgements",
        "scores",
    ): "J: {trajectory_id: {score, explanation, parts, position, attempt, turns}}; position as shown, from 0",
}


def upgrade() -> None:
    """Change the comments of these columns; SQLite keeps none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for (table, column), comment in COMMENTS.items():
        kind = sa.JSON if column == "scores" else sa.Text
        op.alter_column(table, column, existing_type=kind, comment=comment)
