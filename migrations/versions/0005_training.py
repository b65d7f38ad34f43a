"""Training: steps asked for by hand, supervised ones, and all that a step was."""

import sqlalchemy as sa
from alembic import op

from whetstone.database.types import Json, TokenIds, Utc

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COLUMNS = (
    ("policies", "step_asked", Json, "P: the step asked for by hand: {kind, ...}; NULL while none is"),
    ("policies", "step_asked_at", Utc, "P: when it was asked for"),
    ("steps", "kind", sa.Text, "T: grpo | sft; NULL of steps before there were two"),
    ("steps", "asked_at", Utc, "T: when it was asked for by hand; NULL where it was due by itself"),
    ("steps", "loss_function", sa.Text, "T: dppo_tv | cispo | dapo | grpo | dr_grpo | gspo | nll"),
    ("steps", "learning_rate", sa.Float, "T: the optimizer's"),
    ("steps", "advantage_spread", sa.Float, "T: population standard deviation over what was trained on"),
    ("steps", "completions", sa.Integer, "T: trained on; rows before merging"),
    ("steps", "rows", sa.Integer, "T: trained on, after merging"),
    ("steps", "read_tokens", sa.Integer, "T: tokens of the forward passes; what rows share counts once"),
    ("steps", "discarded", Json, "T: {reason: groups} given up when it was claimed"),
    ("steps", "kept", sa.Text, "T: file with the rows of a step whose numbers were not finite"),
    ("steps", "imitates", Json, "T: {from, min_reward, limit} of a supervised step; NULL of others"),
)
INDEXES = (
    ("ix_feedback_demonstrations", "feedback", ("project", "created_at", "id"), "demonstration IS NOT NULL"),
    ("ix_steps_under_way", "steps", ("project", "policy"), "ended_at IS NULL"),
    ("ix_steps_asked", "steps", ("project", "policy", "asked_at"), "asked_at IS NOT NULL"),
)
"""Name, table, columns, and the rows it keeps."""
ADMIN_STEPS = """
    SELECT project, policy, number AS step, state, version_in, version_out, groups, trajectories, baselined,
           reward_mean, reward_spread, loss, kl, entropy, mismatch_k3, fresh_share, masked_share, grad_norm,
           sampled_tokens, tokens_per_s, seconds, phases, config, error, attempt, created_at, ended_at
    FROM steps
"""
ADMIN_STEPS_TOLD = """
    SELECT project, policy, number AS step, coalesce(kind, 'grpo') AS kind, state, version_in, version_out, groups,
           trajectories, baselined, reward_mean, reward_spread, advantage_spread, loss_function, loss, kl, entropy,
           mismatch_k3, fresh_share, masked_share, grad_norm, learning_rate, completions, rows, sampled_tokens,
           read_tokens, tokens_per_s, seconds, phases, discarded, config, error, kept, attempt, asked_at, imitates,
           created_at, ended_at
    FROM steps
"""
ADMIN_EXAMPLES = """
    SELECT project, policy, source, source_id, trajectory_id, completion_id, prompt_token_ids, token_ids, left_out,
           step, created_at
    FROM examples
"""


def upgrade() -> None:
    """Add columns and the table of examples, then show them."""
    for table, name, kind, comment in COLUMNS:
        op.add_column(table, sa.Column(name, kind, comment=comment))
    op.create_table(
        "examples",
        sa.Column("project", sa.Text, primary_key=True, comment="T: the tenant"),
        sa.Column("policy", sa.Text, primary_key=True, comment="T: who is to learn from it"),
        sa.Column("source_id", sa.Text, primary_key=True, comment="T: the feedback or the completion it was made of"),
        sa.Column("source", sa.Text, nullable=False, comment="T: demonstrations | best | the policy that answered"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="T: the trajectory it answers in"),
        sa.Column("completion_id", sa.Text, nullable=False, comment="T: the completion whose prompt it answers"),
        sa.Column(
            "prompt_token_ids",
            TokenIds,
            comment="T: rendered by vLLM, once; NULL where the completion has its own",
        ),
        sa.Column("token_ids", TokenIds, comment="T: the answer's, likewise"),
        sa.Column("left_out", sa.Text, comment="T: why it cannot be trained on; NULL where it can"),
        sa.Column("step", sa.Integer, comment="T: the last step that took it; NULL until one does"),
        sa.Column("created_at", Utc, nullable=False, comment="T"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_examples_policies"
        ),
        comment="answers that supervised steps imitate; no policy-gradient step reads them",
    )
    for index, table, columns, kept in INDEXES:
        op.create_index(index, table, list(columns), sqlite_where=sa.text(kept), postgresql_where=sa.text(kept))
    _show(ADMIN_STEPS_TOLD)
    op.execute(sa.text(f"CREATE VIEW admin_examples AS {ADMIN_EXAMPLES}"))


def downgrade() -> None:
    """Drop them again, and what they held."""
    op.execute(sa.text("DROP VIEW admin_examples"))
    _show(ADMIN_STEPS)
    for index, table, _, _ in INDEXES:
        op.drop_index(index, table)
    op.drop_table("examples")
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)


def _show(query: str) -> None:
    op.execute(sa.text("DROP VIEW admin_steps"))
    op.execute(sa.text(f"CREATE VIEW admin_steps AS {query}"))
