"""Threads, groups from live traffic, feedback whole, rewards in code, baselines."""

import sqlalchemy as sa
from alembic import op

from migrations.views_0001 import SHARED
from whetstone.database.types import Json, Utc

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

COLUMNS = (
    ("groups", "prompt_hash", sa.Text, "J: of its members' first prompt, where that formed it"),
    ("groups", "target_size", sa.Integer, "P: X-Group-Size; NULL where the setting counts"),
    ("groups", "close_asked_at", Utc, "J: when the app asked to close it"),
    (
        "groups",
        "compared_with",
        sa.Text,
        "J: group | baseline: what its rewards are measured against; NULL until scored",
    ),
    ("trajectories", "prompt_hash", sa.Text, "P: of its first prompt, tools and task; those that share it are grouped"),
    (
        "trajectories",
        "continues",
        sa.Text,
        "P: the completion it goes on from, of a trajectory that was over or went on elsewhere",
    ),
    ("trajectories", "end_user", sa.Text, "P: whom its first call was for"),
    ("trajectories", "left_group_id", sa.Text, "J: the group it was moved from; feedback on that still counts for it"),
    ("trajectories", "code_parts", Json, "J: {name: number}, what the policy's reward functions said"),
    ("trajectories", "code_error", sa.Text, "J: why a reward function said nothing"),
    ("trajectories", "code_due_at", Utc, "J: when the reward functions are to run; NULL while they are not"),
    (
        "completions",
        "history",
        sa.LargeBinary,
        "P: 16 bytes, hash of conversation and answer; what extends it is found by it",
    ),
    (
        "completions",
        "tool_history",
        sa.LargeBinary,
        "P: 16 bytes, hash of the tool calls it made, ids included; likewise",
    ),
    ("completions", "continued_by", sa.Text, "P: the first whole completion that extends it; NULL while none does"),
    ("feedback", "parts", Json, "P: {name: number}, weighted by the policy's settings"),
    ("feedback", "demonstration", Json, "P: the message that would have been right"),
    ("feedback", "judge", Json, "P: which judge is to rank the group, and by what rubric"),
    ("feedback", "withdrawn_at", Utc, "P: when the app took it back; NULL while it stands"),
    (
        "steps",
        "baselined",
        sa.Integer,
        "T: of its trajectories, those compared with a running mean instead of a group",
    ),
    (
        "step_trajectories",
        "baseline",
        sa.Float,
        "T: the running mean its reward was compared with; NULL where its group was",
    ),
)
INDEXES = (
    (
        "ix_groups_prompt",
        "groups",
        ("project", "policy", "prompt_hash", "created_at"),
        "prompt_hash IS NOT NULL",
    ),
    ("ix_trajectories_ended", "trajectories", ("project", "ended_at", "id"), "ended_at IS NOT NULL"),
    ("ix_trajectories_code_due", "trajectories", ("code_due_at",), "code_due_at IS NOT NULL"),
    ("ix_trajectories_continues", "trajectories", ("project", "continues"), "continues IS NOT NULL"),
    ("ix_completions_history", "completions", ("project", "history", "id"), "history IS NOT NULL"),
    ("ix_completions_tool_history", "completions", ("project", "tool_history", "id"), "tool_history IS NOT NULL"),
    (
        "ix_feedback_withdrawn",
        "feedback",
        ("withdrawn_at",),
        "withdrawn_at IS NOT NULL AND state IN ('waiting', 'applied', 'superseded')",
    ),
)
"""Name, table, columns, and the rows it keeps."""

COMMENTS = {
    ("groups", "id"): ("P: given by the app, or made for the choices of a call", "P, J: given by the app, else made"),
    ("groups", "policy"): ("P: policy of its first completion", "P, J: policy of its first completion"),
    ("groups", "formed_by"): (
        "P: header | prompt | choices | shadow | single",
        "P, J: header | prompt | choices | shadow | single",
    ),
    ("groups", "created_at"): ("P", "P, J"),
    ("trajectories", "group_id"): ("P: NULL while it belongs to none", "P, J: NULL while it belongs to none"),
    ("trajectories", "reward_source"): (
        "J: trajectory | completions | group: whose feedback set it",
        "J: trajectory | completions | group | code | failure: what set it",
    ),
    ("completions", "threaded_by"): (
        "P: header | new: the rule that found the trajectory",
        "P: the rule that found the trajectory, one of docs/whose_call.md",
    ),
    ("feedback", "reward"): (
        "P: for a trajectory or completion",
        "P: for a trajectory or completion; J: the weighted sum of its parts",
    ),
    ("feedback", "source"): (
        "P: reward | thumbs",
        "P: reward | thumbs | parts | demonstration | judge | end | close",
    ),
}
"""Column: its comment before and after."""

VIEWS = {
    # Whether its policy trains is not the trajectory's to remember: it would be wrong as soon as somebody switches.
    "admin_trajectories": """
        SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.split, t.state, t.reward,
               t.reward_source, t.first_version, t.last_version, t.completions, t.sampled_tokens,
               CASE WHEN t.why_not_trained = 'waiting_step' AND p.state <> 'training' THEN 'policy_not_training'
                    ELSE t.why_not_trained END AS why_not_trained,
               t.trained_in_step, t.metadata, t.no_train, t.continues, t.end_user, t.code_parts, t.code_error,
               t.created_at, t.last_seen_at, t.ended_at
        FROM trajectories AS t
        LEFT JOIN policies AS p ON p.project = t.project AND p.id = t.policy
    """,
    "admin_groups": """
        SELECT project, id AS group_id, policy, formed_by, state, reason, size, rewarded, reward_mean, reward_spread,
               compared_with, step, created_at, closed_at
        FROM groups
    """,
    "admin_feedback": """
        SELECT project, id AS feedback_id, target_kind, target_id, choice, trajectory_id, completion_id, reward,
               rewards, parts, demonstration, judge, source, final, comment, metadata, state, reason, step,
               created_at, applied_at, withdrawn_at
        FROM feedback
    """,
    "admin_steps": """
        SELECT project, policy, number AS step, state, version_in, version_out, groups, trajectories, baselined,
               reward_mean, reward_spread, loss, kl, entropy, mismatch_k3, fresh_share, masked_share, grad_norm,
               sampled_tokens, tokens_per_s, seconds, phases, config, error, attempt, created_at, ended_at
        FROM steps
    """,
}
ADMIN_BASELINES = "SELECT project, policy, task, end_user, mean, count, updated_at FROM baselines"


def upgrade() -> None:
    """Add columns, indexes and tables, then show them."""
    for table, name, kind, comment in COLUMNS:
        op.add_column(table, sa.Column(name, kind, comment=comment))
    for index, table, columns, kept in INDEXES:
        op.create_index(index, table, list(columns), sqlite_where=sa.text(kept), postgresql_where=sa.text(kept))
    op.create_table(
        "baselines",
        sa.Column("project", sa.Text, primary_key=True, comment="T: the tenant"),
        sa.Column("policy", sa.Text, primary_key=True, comment="T"),
        sa.Column("task", sa.Text, primary_key=True, comment="T: the app's label; empty where it gave none"),
        sa.Column("end_user", sa.Text, primary_key=True, comment="T: whose rewards these are; empty for everybody's"),
        sa.Column("mean", sa.Float, nullable=False, comment="T: running mean of the rewards"),
        sa.Column("count", sa.Integer, nullable=False, comment="T: rewards it was made of"),
        sa.Column("updated_at", Utc, nullable=False, comment="T"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_baselines_policies"
        ),
        comment="what a trajectory that is alone is compared with: running means of rewards",
    )
    op.create_table(
        "proxies",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P: one process of it"),
        sa.Column("written_until", Utc, nullable=False, comment="P: calls it finished before then are in the tables"),
        sa.Column("seen_at", Utc, nullable=False, comment="P: when it said so"),
        comment="the proxy processes, so that each knows when the others' calls can be found",
    )
    _comment(after=True)
    _show(VIEWS)
    op.execute(sa.text(f"CREATE VIEW admin_baselines AS {ADMIN_BASELINES}"))


def downgrade() -> None:
    """Drop them again, and what they held."""
    op.execute(sa.text("DROP VIEW admin_baselines"))
    _show({name: SHARED[name] for name in VIEWS})
    _comment(after=False)
    op.drop_table("proxies")
    op.drop_table("baselines")
    for index, table, _, _ in INDEXES:
        op.drop_index(index, table)
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)


def _show(queries: dict[str, str]) -> None:
    for view, query in queries.items():
        op.execute(sa.text(f"DROP VIEW {view}"))
        op.execute(sa.text(f"CREATE VIEW {view} AS {query}"))


def _comment(*, after: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        for (table, column), comments in COMMENTS.items():
            op.alter_column(table, column, comment=comments[after], existing_comment=comments[not after])
