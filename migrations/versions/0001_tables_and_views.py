"""The tables and the admin views of the first version."""

import sqlalchemy as sa
from alembic import op

from migrations.views_0001 import views
from whetstone.database.types import Json, Logprobs, TokenIds, Utc

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    "projects",
    "policies",
    "policy_versions",
    "groups",
    "trajectories",
    "completions",
    "feedback",
    "steps",
    "step_trajectories",
)
"""Each after those it refers to."""


def upgrade() -> None:
    """Make the tables, then the views on them."""
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, primary_key=True, comment="W: the tenant; `default` on one machine"),
        sa.Column("created_at", Utc, nullable=False, comment="W"),
        comment="tenants",
    )
    op.create_table(
        "policies",
        sa.Column("project", sa.Text, primary_key=True, comment="W: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="W: the name apps ask for as `model`"),
        sa.Column("base_model", sa.Text, nullable=False, comment="W: the name vLLM serves the base model under"),
        sa.Column("model_path", sa.Text, nullable=False, comment="W: folder or hub name of the base model's weights"),
        sa.Column(
            "live_version", sa.Integer, nullable=False, comment="W, T: the version that answers; 0 is the base model"
        ),
        sa.Column(
            "next_version", sa.Integer, nullable=False, comment="T: the number the next version gets; never reused"
        ),
        sa.Column("next_step", sa.Integer, nullable=False, comment="T: the number the next step gets; never reused"),
        sa.Column("state", sa.Text, nullable=False, comment="W: recording | training | paused"),
        sa.Column("created_at", Utc, nullable=False, comment="W"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_policies_projects"),
        comment="names that apps may ask for as `model`: a base model and the line of adapters trained on it",
    )
    op.create_table(
        "policy_versions",
        sa.Column("project", sa.Text, primary_key=True, comment="W, T: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="W, T: `policy@vN`; also the adapter's name in vLLM"),
        sa.Column("policy", sa.Text, nullable=False, comment="W, T"),
        sa.Column("version", sa.Integer, nullable=False, comment="W, T: 0 is the base model without adapter"),
        sa.Column("parent", sa.Integer, comment="T: the version the step started from; NULL for 0"),
        sa.Column("state", sa.Text, nullable=False, comment="W, T: building | candidate | live | retired | rejected"),
        sa.Column("reason", sa.Text, comment="T: why rejected"),
        sa.Column("step", sa.Integer, comment="T: number of the step that made it; NULL for 0"),
        sa.Column("adapter_path", sa.Text, comment="T: folder of the LoRA files; NULL for 0"),
        sa.Column("manifest_sha256", sa.Text, comment="T: hash of the folder's manifest; NULL for 0"),
        sa.Column("served", sa.Boolean, nullable=False, comment="T: vLLM is to keep it loaded; requests may name it"),
        sa.Column("probe_k3", sa.Float, comment="T: nats, k3 between vLLM and the trainer on the probe's tokens"),
        sa.Column("created_at", Utc, nullable=False, comment="W, T"),
        sa.Column("promoted_at", Utc, comment="W, T: when it last became live"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_policy_versions_policies"
        ),
        sa.UniqueConstraint("project", "policy", "version", name="uq_policy_versions_project_policy_version"),
        comment="a policy's versions: the base model (0) and the adapters trained on it",
    )
    op.create_table(
        "groups",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P: given by the app, or made for the choices of a call"),
        sa.Column("policy", sa.Text, nullable=False, comment="P: policy of its first completion"),
        sa.Column("formed_by", sa.Text, nullable=False, comment="P: header | prompt | choices | shadow | single"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P, J, T: open | closed | scored | claimed | trained | discarded"
        ),
        sa.Column("reason", sa.Text, comment="J, T: why discarded"),
        sa.Column("size", sa.Integer, nullable=False, comment="J: members when it closed; 0 while open"),
        sa.Column("rewarded", sa.Integer, nullable=False, comment="J: members with a reward"),
        sa.Column("reward_mean", sa.Float, comment="J: over its rewarded members"),
        sa.Column("reward_spread", sa.Float, comment="J: population standard deviation over its rewarded members"),
        sa.Column("step", sa.Integer, comment="T: number of the step that claimed it"),
        sa.Column("created_at", Utc, nullable=False, comment="P"),
        sa.Column("closed_at", Utc, comment="J"),
        sa.Column("due_at", Utc, comment="J: when to look at it next; NULL while nothing but a new member can move it"),
        sa.ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"], name="fk_groups_policies"),
        sa.Index("ix_groups_project_policy_state_closed_at", "project", "policy", "state", "closed_at"),
        _where("ix_groups_due", "due_at", where="due_at IS NOT NULL"),
        comment="trajectories that answer the same prompt and are compared with one another",
    )
    op.create_table(
        "trajectories",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P: given by the app, else made"),
        sa.Column("group_id", sa.Text, comment="P: NULL while it belongs to none"),
        sa.Column("policy", sa.Text, nullable=False, comment="P: policy of its first completion"),
        sa.Column("task", sa.Text, comment="P: the app's label"),
        sa.Column("split", sa.Text, nullable=False, comment="P: train | eval; eval is never trained on"),
        sa.Column("no_train", sa.Boolean, nullable=False, comment="P: the app asked not to train on it"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P, J, T: open | ended | rewarded | claimed | trained | excluded"
        ),
        sa.Column("reward", sa.Float, comment="J: the number it is trained on"),
        sa.Column("reward_source", sa.Text, comment="J: trajectory | completions | group: whose feedback set it"),
        sa.Column("first_version", sa.Integer, comment="P: policy version of its first completion"),
        sa.Column("last_version", sa.Integer, comment="P: policy version of its last completion"),
        sa.Column("completions", sa.Integer, nullable=False, comment="P: how many it has; the next turn's number"),
        sa.Column("sampled_tokens", sa.Integer, nullable=False, comment="P: tokens sampled in it"),
        sa.Column("tail_completion_id", sa.Text, comment="P: its last completion"),
        sa.Column("why_not_trained", sa.Text, comment="P, J, T: one of docs/why_not_trained.md; NULL once trained"),
        sa.Column("trained_in_step", sa.Integer, comment="T: number of the step"),
        sa.Column("metadata", Json, comment="P: the app's JSON object"),
        sa.Column("created_at", Utc, nullable=False, comment="P"),
        sa.Column(
            "last_seen_at", Utc, nullable=False, comment="P: its last completion's time; idleness counts from here"
        ),
        sa.Column("ended_at", Utc, comment="J"),
        sa.Column("placed_at", Utc, comment="J: when its group was told of it; NULL until J has seen it"),
        sa.Index("ix_trajectories_project_group_id", "project", "group_id"),
        _where("ix_trajectories_open", "last_seen_at", where="state = 'open'"),
        _where("ix_trajectories_unplaced", "created_at", where="placed_at IS NULL"),
        sa.Index("ix_trajectories_project_created_at", "project", "created_at"),
        comment="attempts at something: their completions in order, and what each attempt was worth",
    )
    op.create_table(
        "completions",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P"),
        sa.Column(
            "upstream_id",
            sa.Text,
            nullable=False,
            comment="P: `chatcmpl-…`, as the app holds it; shared by the choices",
        ),
        sa.Column("call_id", sa.Text, nullable=False, comment="P: shared by the choices of one call"),
        sa.Column("choice", sa.Integer, nullable=False, comment="P: place among the call's choices, from 0"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="P"),
        sa.Column("turn", sa.Integer, nullable=False, comment="P: its place in the trajectory, from 0"),
        sa.Column("policy", sa.Text, nullable=False, comment="P"),
        sa.Column("policy_version", sa.Integer, nullable=False, comment="P: the version that spoke"),
        sa.Column("endpoint", sa.Text, nullable=False, comment="P: `chat.completions`"),
        sa.Column("streamed", sa.Boolean, nullable=False, comment="P"),
        sa.Column("status", sa.Text, nullable=False, comment="P: complete | aborted | error"),
        sa.Column("error", sa.Text, comment="P: what went wrong, for status error"),
        sa.Column(
            "follows",
            sa.Text,
            comment="P: completion whose prompt and answer this prompt extends; NULL for a first turn",
        ),
        sa.Column("key_id", sa.Text, comment="P: the API key that asked; NULL without keys"),
        sa.Column("end_user", sa.Text, comment="P: the body's `user`"),
        sa.Column("new_messages", Json, comment="P: the request's messages after those of `follows` and its answer"),
        sa.Column("tools", Json, comment="P: the request's tools where they differ from those of `follows`"),
        sa.Column("response", Json, comment="P: the message that was answered"),
        sa.Column("response_text", sa.Text, comment="P: its content"),
        sa.Column(
            "prompt_token_ids", TokenIds, comment="P: what this turn added after `follows`; the whole prompt without"
        ),
        sa.Column("token_ids", TokenIds, comment="P: sampled ids, as vLLM returned them"),
        sa.Column("inference_logprobs", Logprobs, comment="P: nats, one per sampled id, as vLLM returned them"),
        sa.Column("sampling", Json, comment="P: the request's fields other than model, messages and tools"),
        sa.Column("finish_reason", sa.Text, comment="P"),
        sa.Column("prompt_tokens", sa.Integer, comment="P: length of the whole prompt"),
        sa.Column("completion_tokens", sa.Integer, comment="P: length of token_ids"),
        sa.Column("ttft_ms", sa.Float, comment="P: milliseconds from request to first event; NULL unless streamed"),
        sa.Column("total_ms", sa.Float, comment="P: milliseconds from request to last byte"),
        sa.Column("retry_of", sa.Text, comment="P: the completion this one repeats"),
        sa.Column(
            "threaded_by", sa.Text, nullable=False, comment="P: header | new: the rule that found the trajectory"
        ),
        sa.Column("why_not_trained", sa.Text, comment="P: what this completion lacks; NULL when it can be trained on"),
        sa.Column("created_at", Utc, nullable=False, comment="P: when the request arrived"),
        sa.ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            name="fk_completions_trajectories",
        ),
        sa.UniqueConstraint("project", "trajectory_id", "turn", name="uq_completions_project_trajectory_id_turn"),
        sa.Index("ix_completions_project_upstream_id", "project", "upstream_id"),
        sa.Index("ix_completions_project_created_at", "project", "created_at"),
        comment="one choice of a served call each, with the very ids and logprobs vLLM returned",
    )
    op.create_table(
        "feedback",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P"),
        sa.Column("target_kind", sa.Text, nullable=False, comment="P: trajectory | completion | group"),
        sa.Column("target_id", sa.Text, nullable=False, comment="P: as the app gave it"),
        sa.Column("trajectory_id", sa.Text, comment="J: the trajectory it was applied to; NULL for a group"),
        sa.Column(
            "completion_id", sa.Text, comment="J: the completion it was applied to; NULL for a trajectory or a group"
        ),
        sa.Column("choice", sa.Integer, nullable=False, comment="P: which choice of a `chatcmpl-` id"),
        sa.Column("reward", sa.Float, comment="P: for a trajectory or completion"),
        sa.Column("rewards", Json, comment="P: {trajectory_id: number}, for a group"),
        sa.Column("source", sa.Text, nullable=False, comment="P: reward | thumbs"),
        sa.Column("final", sa.Boolean, nullable=False, comment="P: it ends the trajectory"),
        sa.Column("comment", sa.Text, comment="P"),
        sa.Column("metadata", Json, comment="P"),
        sa.Column("idempotency_key", sa.Text, comment="P"),
        sa.Column("key_id", sa.Text, comment="P"),
        sa.Column(
            "state",
            sa.Text,
            nullable=False,
            comment="P, J, T: waiting | applied | superseded | withdrawn | used | unused | failed",
        ),
        sa.Column("reason", sa.Text, comment="J, T: why unused or failed"),
        sa.Column("step", sa.Integer, comment="T: number of the step that trained on it"),
        sa.Column("created_at", Utc, nullable=False, comment="P"),
        sa.Column("applied_at", Utc, comment="J"),
        sa.Column("due_at", Utc, comment="J: when to look for its target again; NULL until it was looked for once"),
        sa.UniqueConstraint("project", "idempotency_key", name="uq_feedback_project_idempotency_key"),
        _where("ix_feedback_fresh", "created_at", "id", where="state = 'waiting' AND due_at IS NULL"),
        _where("ix_feedback_due", "due_at", where="state = 'waiting' AND due_at IS NOT NULL"),
        _where("ix_feedback_groups", "project", "target_id", where="target_kind = 'group'"),
        sa.Index("ix_feedback_project_trajectory_id", "project", "trajectory_id"),
        comment="what apps said an attempt was worth, and what became of it",
    )
    op.create_table(
        "steps",
        sa.Column("project", sa.Text, primary_key=True, comment="T: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="T: `policy#number`"),
        sa.Column("policy", sa.Text, nullable=False, comment="T"),
        sa.Column("number", sa.Integer, nullable=False, comment="T: from 1, per policy"),
        sa.Column(
            "state",
            sa.Text,
            nullable=False,
            comment="T: claimed | trained | loaded | promoted | rejected | noop | failed",
        ),
        sa.Column("version_in", sa.Integer, nullable=False, comment="T: the version it starts from"),
        sa.Column("version_out", sa.Integer, comment="T: the version it makes"),
        sa.Column("groups", sa.Integer, nullable=False, comment="T: claimed"),
        sa.Column("trajectories", sa.Integer, nullable=False, comment="T: claimed"),
        sa.Column("reward_mean", sa.Float, comment="T: over its trajectories"),
        sa.Column("reward_spread", sa.Float, comment="T: population standard deviation over its trajectories"),
        sa.Column("loss", sa.Float, comment="T"),
        sa.Column("kl", sa.Float, comment="T: nats a token, k3 to the base model"),
        sa.Column("entropy", sa.Float, comment="T: nats a token, of the trainer's distribution at sampled positions"),
        sa.Column(
            "mismatch_k3",
            sa.Float,
            comment="T: nats a token, k3 between inference and trainer over tokens of version_in",
        ),
        sa.Column("fresh_share", sa.Float, comment="T: share of its sampled tokens that version_in spoke"),
        sa.Column("masked_share", sa.Float, comment="T: share of its sampled tokens the loss masked out"),
        sa.Column("grad_norm", sa.Float, comment="T: before clipping"),
        sa.Column("sampled_tokens", sa.Integer, comment="T: tokens trained on"),
        sa.Column("tokens_per_s", sa.Float, comment="T: sampled tokens per second of the whole step"),
        sa.Column("seconds", sa.Float, comment="T: from claim to promotion"),
        sa.Column("phases", Json, comment="T: {phase: seconds}"),
        sa.Column("config", Json, nullable=False, comment="T: the trainer's settings it ran with"),
        sa.Column("error", sa.Text, comment="T: why failed, rejected or without a version"),
        sa.Column(
            "attempt", sa.Integer, nullable=False, comment="T: fencing token; grows with each claim of the same step"
        ),
        sa.Column("lease_until", Utc, comment="T: another worker may take it over from then on; NULL when over"),
        sa.Column("created_at", Utc, nullable=False, comment="T"),
        sa.Column("ended_at", Utc, comment="T"),
        sa.ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"], name="fk_steps_policies"),
        sa.UniqueConstraint("project", "policy", "number", name="uq_steps_project_policy_number"),
        comment="one optimizer update of one policy each",
    )
    op.create_table(
        "step_trajectories",
        sa.Column("project", sa.Text, primary_key=True, comment="T: the tenant"),
        sa.Column("step_id", sa.Text, primary_key=True, comment="T"),
        sa.Column("trajectory_id", sa.Text, primary_key=True, comment="T"),
        sa.Column("policy", sa.Text, nullable=False, comment="T"),
        sa.Column("group_id", sa.Text, nullable=False, comment="T"),
        sa.Column("reward", sa.Float, nullable=False, comment="T: frozen when the step claimed it"),
        sa.Column("advantage", sa.Float, comment="T: NULL until trained"),
        sa.Column(
            "staleness",
            sa.Integer,
            nullable=False,
            comment="T: updates from the oldest version that spoke to version_in",
        ),
        sa.ForeignKeyConstraint(
            ["project", "step_id"], ["steps.project", "steps.id"], name="fk_step_trajectories_steps"
        ),
        # Once: whatever dies or is redelivered, no second policy-gradient step of a policy takes the same trajectory.
        sa.UniqueConstraint(
            "project", "policy", "trajectory_id", name="uq_step_trajectories_project_policy_trajectory_id"
        ),
        comment="what each step trained on",
    )
    for name, query in views(op.get_bind().dialect.name).items():
        op.execute(sa.text(f"CREATE VIEW {name} AS {query}"))


def downgrade() -> None:
    """Drop everything: what was recorded is lost."""
    for name in views(op.get_bind().dialect.name):
        op.execute(sa.text(f"DROP VIEW {name}"))
    for table in reversed(TABLES):
        op.drop_table(table)


def _where(name: str, *columns: str, where: str) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
