"""Steps on pairs, scores of turns, tokens of other servers: what columns may contain."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

COMMENTS = {
    ("completions", "completion_tokens"): "P: length of token_ids; of another server, as it reports",
    (
        "steps",
        "imitates",
    ): "T: {from, min_reward, limit} of a step on answers, words, a teacher, or of what it replays; else NULL",
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


EXAMPLES = "answers that steps imitate or prefer, that words correct or teachers score; none is weighed by its reward"


def upgrade() -> None:
    """Change the comments of these columns and of a table; SQLite keeps none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.create_table_comment("examples", EXAMPLES)
    for (table, column), comment in COMMENTS.items():
        kind = {"scores": sa.JSON, "imitates": sa.JSON, "completion_tokens": sa.Integer}.get(column, sa.Text)
        op.alter_column(table, column, existing_type=kind, comment=comment)
