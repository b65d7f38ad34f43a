"""Steps on pairs, scores of turns, tokens of other servers: what columns may contain."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

COMMENTS = {
    ("completions", "completion_tokens"): "P: length of token_ids; of another server, as it reports",
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
        kind = {"scores": sa.JSON, "completion_tokens": sa.Integer}.get(column, sa.Text)
        op.alter_column(table, column, existing_type=kind, comment=comment)
