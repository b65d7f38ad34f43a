"""Steps that prefer the better of two answers of another policy: what columns may now contain."""

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
}


def upgrade() -> None:
    """Change the comments of these columns; SQLite keeps none."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for (table, column), comment in COMMENTS.items():
        op.alter_column(table, column, existing_type=sa.Text, comment=comment)
