"""Constraints of completions; ids within answers; hashes of prompts; an index of failed feedback; stored responses."""

import sqlalchemy as sa
from alembic import op

from migrations import initial_views
from whetstone.database.types import Json, Utc

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

ADDED = "constraints, decided_tokens, explored"


def upgrade() -> None:
    """Add the columns, and show them at the end of `admin_completions`."""
    op.add_column(
        "completions",
        sa.Column(
            "constraints",
            Json,
            comment="P: what bends the distribution that its tokens were sampled from: vLLM's own parameters, and "
            "`grammar` with its source; NULL if nothing does",
        ),
    )
    op.add_column(
        "completions",
        sa.Column(
            "decided_tokens",
            sa.Integer,
            comment="T: sampled tokens that its constraints decided: a step learns nothing from them; NULL until a "
            "step has measured it",
        ),
    )
    op.add_column(
        "completions",
        sa.Column(
            "explored",
            sa.Float,
            comment="P: the temperature that its policy explored with, where the app set 0; NULL if it did not explore",
        ),
    )
    op.add_column(
        "completions",
        sa.Column(
            "prompt_history",
            sa.LargeBinary,
            comment="P: 16 bytes, hash of the whole prompt; what repeats its answer in other words is found by it",
        ),
    )
    op.create_index(
        "ix_completions_prompt_history",
        "completions",
        ["project", "prompt_history", "id"],
        sqlite_where=sa.text("prompt_history IS NOT NULL"),
        postgresql_where=sa.text("prompt_history IS NOT NULL"),
    )
    op.add_column(
        "completions",
        sa.Column(
            "stored_response",
            Json,
            comment="P: what a stored response has that is in no other column; NULL if no request may name it",
        ),
    )
    op.create_table(
        "erased_responses",
        sa.Column("project", sa.Text, nullable=False, comment="W, P, J: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="W, P, J: the answer's id, as an app may still hold it"),
        sa.Column("erased_at", Utc, nullable=False, comment="W, P, J"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_erased_responses"),
        sa.Index("ix_erased_responses_project_erased_at", "project", "erased_at"),
        comment="ids of stored responses that were deleted with their trajectories, to say so to a request for one",
    )
    for statement in initial_views.extended(op.get_bind().dialect.name, "admin_completions", "created_at", ADDED):
        op.execute(sa.text(statement))
    _add_answer_ids()
    failed = sa.text("state = 'failed'")
    op.create_index(
        "ix_feedback_failed",
        "feedback",
        ["project", "created_at"],
        sqlite_where=failed,
        postgresql_where=failed,
    )


def _add_answer_ids() -> None:
    op.create_table(
        "answer_ids",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("completion_id", sa.Text, nullable=False, comment="P: the completion whose answer has it"),
        sa.Column("id", sa.Text, nullable=False, comment="P: of a tool call or an item, as the app holds it"),
        sa.PrimaryKeyConstraint("project", "completion_id", "id", name="pk_answer_ids"),
        sa.ForeignKeyConstraint(
            ["project", "completion_id"], ["completions.project", "completions.id"], name="fk_answer_ids_completions"
        ),
        sa.Index("ix_answer_ids_project_id", "project", "id"),
        comment="ids within answers, by which feedback may name a completion",
    )
