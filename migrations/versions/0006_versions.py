"""Versions: pinned, tested, rolled back, compared on held-out prompts; the servers that have them, and their pauses."""

import sqlalchemy as sa
from alembic import op

from migrations.views_0001 import SHARED
from whetstone.database.types import Json, Utc

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = (
    (
        "projects",
        "pause_id",
        sa.Text,
        "T: the step that has the accelerator, which vLLM shares; NULL while vLLM has it",
    ),
    ("projects", "pause_until", Utc, "T: vLLM may have it back from then on, whatever became of the step"),
    (
        "policy_versions",
        "origin",
        sa.Text,
        "W: where it is from if no step made it: the version it was forked from, or a path",
    ),
    ("policy_versions", "pinned_at", Utc, "P, W: since when it is kept loaded by hand; NULL where it is not"),
    ("policy_versions", "unserved_at", Utc, "P, T, W: when requests could no longer name it; NULL while they can"),
    ("policy_versions", "removed_at", Utc, "T: when its folder was removed"),
    ("policy_versions", "tested_by", sa.Text, "T: heldout | canary: the test that a candidate is in; NULL of others"),
    ("policy_versions", "tested_since", Utc, "T: since when"),
    (
        "policy_versions",
        "canary_share",
        sa.Float,
        "T: share of new trajectories it answers as a candidate; NULL: none",
    ),
    (
        "policy_versions",
        "heldout_mean",
        sa.Float,
        "T: mean reward on the held-out prompts; NULL where it was not tested",
    ),
    ("policy_versions", "heldout_count", sa.Integer, "T: how many prompts that were"),
    (
        "policy_versions",
        "watched_at",
        Utc,
        "T: when its live rewards had been compared with its parent's for good",
    ),
    ("proxies", "in_flight", sa.Integer, "P: calls that vLLM is answering for it"),
    ("proxies", "waiting", sa.Integer, "P: calls that wait until a server can answer them"),
    (
        "proxies",
        "pause_seen",
        sa.Text,
        "P: the pause it knows of; it lets no call through to vLLM while that lasts",
    ),
)
COMMENTS = {
    ("groups", "formed_by"): (
        "P, J: header | prompt | choices | shadow | single",
        "P, J: header | prompt | choices | shadow | evaluation | single",
    ),
    ("policies", "live_version"): (
        "W, T: the version that answers; 0 is the base model",
        "W, T, P: the version that answers; 0 is the base model",
    ),
    ("policies", "next_version"): (
        "T: the number the next version gets; never reused",
        "T, W: the number the next version gets; never reused",
    ),
    ("policy_versions", "parent"): (
        "T: the version the step started from; NULL for 0",
        "T, W: the version the step started from; NULL for 0",
    ),
    ("policy_versions", "adapter_path"): (
        "T: folder of the LoRA files; NULL for 0",
        "T, W: folder of the LoRA files; NULL for 0",
    ),
    ("policy_versions", "manifest_sha256"): (
        "T: hash of the folder's manifest; NULL for 0",
        "T, W: hash of the folder's manifest; NULL for 0",
    ),
    ("policy_versions", "state"): (
        "W, T: building | candidate | live | retired | rejected",
        "W, T, P: building | candidate | live | retired | rejected",
    ),
    ("policy_versions", "reason"): ("T: why rejected", "T, P, W: why rejected"),
    ("policy_versions", "served"): (
        "T: vLLM is to keep it loaded; requests may name it",
        "T, P, W: vLLM is to keep it loaded; requests may name it",
    ),
    ("policy_versions", "promoted_at"): ("W, T: when it last became live", "W, T, P: when it last became live"),
    ("steps", "state"): (
        "T: claimed | trained | loaded | promoted | rejected | noop | failed",
        "T: claimed | trained | loaded | waiting_gate | promoted | rejected | noop | failed",
    ),
}
"""Table and column -> its comment before and after."""
ADMIN_VERSIONS = """
    SELECT v.project, v.policy, v.version, v.parent, v.state, v.reason, v.step, v.origin, v.probe_k3, v.heldout_mean,
           v.heldout_count, v.tested_by, v.tested_since, v.canary_share, v.served, v.pinned_at, v.adapter_path,
           v.created_at, v.promoted_at, v.unserved_at, v.removed_at
    FROM policy_versions AS v
"""
ADMIN_GATE_RESULTS = """
    SELECT project, policy, version, against, test, decision, reason, figures, created_at
    FROM gate_results
"""
ADMIN_REPLICAS = "SELECT project, id AS replica, state, adapters, reason, seen_at FROM replicas"


def upgrade() -> None:
    """Add columns and tables, then show them."""
    for table, name, kind, comment in COLUMNS:
        op.add_column(table, sa.Column(name, kind, comment=comment))
    op.create_table(
        "replicas",
        sa.Column("project", sa.Text, primary_key=True, comment="P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="P: its address"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P: serving | behind (adapters are missing) | away | asleep"
        ),
        sa.Column("adapters", Json, comment="P: names it had loaded when it last answered"),
        sa.Column("reason", sa.Text, comment="P: why it does not serve"),
        sa.Column("seen_at", Utc, nullable=False, comment="P: when it last answered, or was first looked for"),
        comment="the vLLM servers, as the proxy sees them",
    )
    op.create_table(
        "gate_results",
        sa.Column("project", sa.Text, primary_key=True, comment="T, P: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="T, P"),
        sa.Column("policy", sa.Text, nullable=False, comment="T, P"),
        sa.Column("version", sa.Integer, nullable=False, comment="T, P: the version that was decided on"),
        sa.Column("against", sa.Integer, comment="T, P: the version it was compared with, or that took its place"),
        sa.Column("test", sa.Text, nullable=False, comment="T, P: probe | heldout | canary | watch | hand"),
        sa.Column(
            "decision",
            sa.Text,
            nullable=False,
            comment="T, P: pass | reject | testing | promote | rollback | pin | unpin",
        ),
        sa.Column("reason", sa.Text, comment="T, P: in words"),
        sa.Column("figures", Json, comment="T: what it was decided on: {name: number}"),
        sa.Column("created_at", Utc, nullable=False, comment="T, P"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_gate_results_policies"
        ),
        comment="every decision on a version, with its numbers",
    )
    op.create_index(
        "ix_gate_results_project_policy_version_created_at",
        "gate_results",
        ["project", "policy", "version", "created_at"],
    )
    op.create_table(
        "evaluations",
        sa.Column("project", sa.Text, primary_key=True, comment="T: the tenant"),
        sa.Column("trajectory_id", sa.Text, primary_key=True, comment="T: of the answer, which the proxy draws"),
        sa.Column("policy", sa.Text, nullable=False, comment="T"),
        sa.Column("candidate", sa.Integer, nullable=False, comment="T: the version that is tested"),
        sa.Column(
            "version",
            sa.Integer,
            nullable=False,
            comment="T: the version that is to answer: the candidate, or its parent",
        ),
        sa.Column("source_id", sa.Text, nullable=False, comment="T: the completion whose prompt it is"),
        sa.Column("group_id", sa.Text, nullable=False, comment="T: the group of both answers to it"),
        sa.Column("drawn_at", Utc, comment="P: when it was answered; NULL while it is due"),
        sa.Column("error", sa.Text, comment="P: why it cannot be answered"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_evaluations_policies"
        ),
        comment="held-out prompts that a candidate and its parent answer, to be compared",
    )
    op.create_index("ix_evaluations_project_policy_candidate", "evaluations", ["project", "policy", "candidate"])
    due = sa.text("drawn_at IS NULL AND error IS NULL")
    op.create_index(
        "ix_evaluations_due", "evaluations", ["project", "trajectory_id"], sqlite_where=due, postgresql_where=due
    )
    _comment(after=True)
    _show(ADMIN_VERSIONS)
    op.execute(sa.text(f"CREATE VIEW admin_gate_results AS {ADMIN_GATE_RESULTS}"))
    op.execute(sa.text(f"CREATE VIEW admin_replicas AS {ADMIN_REPLICAS}"))


def downgrade() -> None:
    """Drop them again, and what they held."""
    for view in ("admin_replicas", "admin_gate_results"):
        op.execute(sa.text(f"DROP VIEW {view}"))
    _show(SHARED["admin_versions"])
    _comment(after=False)
    for table in ("evaluations", "gate_results", "replicas"):
        op.drop_table(table)
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)


def _show(query: str) -> None:
    op.execute(sa.text("DROP VIEW admin_versions"))
    op.execute(sa.text(f"CREATE VIEW admin_versions AS {query}"))


def _comment(*, after: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        for (table, column), comments in COMMENTS.items():
            op.alter_column(table, column, comment=comments[after], existing_comment=comments[not after])
