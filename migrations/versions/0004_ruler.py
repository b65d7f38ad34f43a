"""Judges: what they were asked, what they said, what it took, and what people are to look at."""

import sqlalchemy as sa
from alembic import op

from whetstone.database.types import Json, Utc

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COLUMNS = (
    ("groups", "judge_asked_at", Utc, "J: when it was to be ranked by judges; NULL where nobody asked"),
    ("groups", "judge_due_at", Utc, "J: when judges are to look at it next; NULL while they are not"),
    ("groups", "judged_at", Utc, "J: when its members as they are were ranked"),
    ("groups", "judge_noise", sa.Float, "J: by how much judges differ from themselves, as a standard deviation"),
    ("groups", "judge_waits", sa.Text, "J: why it is not ranked yet"),
    ("trajectories", "review_at", Utc, "J: when it was drawn for people to look at; NULL for those that were not"),
)
INDEXES = (
    ("ix_groups_judge_due", "groups", ("judge_due_at",), "judge_due_at IS NOT NULL"),
    ("ix_trajectories_review", "trajectories", ("project", "review_at"), "review_at IS NOT NULL"),
)
"""Name, table, columns, and the rows it keeps."""

COMMENTS = {
    ("trajectories", "reward_source"): (
        "J: trajectory | completions | group | code | failure: what set it",
        "J: trajectory | completions | group | judge | code | failure: what set it",
    ),
    ("feedback", "rewards"): (
        "P: {trajectory_id: number}, for a group",
        "P: {trajectory_id: number}, for a group; J: what judges scored it",
    ),
    ("feedback", "source"): (
        "P: reward | thumbs | parts | demonstration | judge | end | close",
        "P, J: reward | thumbs | parts | demonstration | judge | end | close",
    ),
}
"""Column: its comment before and after."""

ADMIN_GROUPS = """
    SELECT project, id AS group_id, policy, formed_by, state, reason, size, rewarded, reward_mean, reward_spread,
           compared_with, step, created_at, closed_at
    FROM groups
"""
ADMIN_GROUPS_JUDGED = """
    SELECT project, id AS group_id, policy, formed_by, state, reason, size, rewarded, reward_mean, reward_spread,
           compared_with, step, judged_at, judge_noise, judge_waits, created_at, closed_at
    FROM groups
"""
JUDGED = """
    SELECT j.project, j.id AS judgement_id, j.group_id, s.key AS trajectory_id, j.policy, j.judge, j.model, j.purpose,
           {score} AS score, {explanation} AS explanation, {parts} AS parts, {position} AS position,
           j.rubric_hash, j.attempts_hash, j.place, j.section, j.cached_from,
           j.cost_usd / {attempts} AS cost_usd,
           (j.prompt_tokens + j.completion_tokens) * 1.0 / {attempts} AS tokens,
           j.calls, j.left_out, j.seconds, j.created_at, j.accepted_at
    FROM judgements AS j CROSS JOIN {each} AS s
    WHERE j.state = 'accepted'
"""
"""A row for each attempt and judgement; cost and tokens are its share of them, so that they can be summed."""
WORDS = {
    "sqlite": {
        "score": "json_extract(s.value, '$.score')",
        "explanation": "json_extract(s.value, '$.explanation')",
        "parts": "json_extract(s.value, '$.parts')",
        "position": "json_extract(s.value, '$.position')",
        "attempts": "(SELECT count(*) FROM json_each(j.scores))",
        "each": "json_each(j.scores)",
    },
    "postgresql": {
        "score": "CAST(s.value ->> 'score' AS double precision)",
        "explanation": "s.value ->> 'explanation'",
        "parts": "s.value -> 'parts'",
        "position": "CAST(s.value ->> 'position' AS integer)",
        "attempts": "(SELECT count(*) FROM jsonb_object_keys(j.scores))",
        "each": "jsonb_each(j.scores)",
    },
}
DRIFT = """
    WITH both_said AS (
        SELECT project, policy, group_id, trajectory_id, min({day}) AS day,
               avg(CASE WHEN purpose = 'reward' THEN score END) AS score,
               avg(CASE WHEN purpose = 'drift' THEN score END) AS strong_score
        FROM admin_judgements
        GROUP BY project, policy, group_id, attempts_hash, trajectory_id
    )
    SELECT a.project, a.policy, a.day, count(DISTINCT a.group_id) AS groups,
           count(*) AS pairs,
           avg(CASE WHEN (a.score - b.score) * (a.strong_score - b.strong_score) > 0 THEN 1.0
                    WHEN a.score = b.score OR a.strong_score = b.strong_score THEN 0.5
                    ELSE 0.0 END) AS agreement,
           avg(a.score - a.strong_score + b.score - b.strong_score) / 2 AS difference
    FROM both_said AS a
    JOIN both_said AS b ON b.project = a.project AND b.group_id = a.group_id AND b.day = a.day
                       AND b.trajectory_id > a.trajectory_id
    WHERE a.score IS NOT NULL AND a.strong_score IS NOT NULL AND b.score IS NOT NULL AND b.strong_score IS NOT NULL
    GROUP BY a.project, a.policy, a.day
"""
"""How a policy's judges and its strong one compare: the share of pairs of attempts that both rank alike (a tie is half
of one), and by how much the judges score higher."""
DAYS = {"sqlite": "date(accepted_at)", "postgresql": "CAST((accepted_at AT TIME ZONE 'UTC') AS date)"}
ADMIN_JUDGE_DAYS = "SELECT project, policy, day, judge, calls, refused, failed, tokens, cost_usd FROM judge_days"
ADMIN_REVIEWS = """
    SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.reward, t.reward_source, t.review_at
    FROM trajectories AS t
    WHERE t.review_at IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM feedback AS f
        WHERE f.project = t.project AND f.trajectory_id = t.id AND f.created_at >= t.review_at
          AND f.source IN ('reward', 'thumbs', 'parts') AND f.withdrawn_at IS NULL
    )
"""
"""What was drawn for people to look at and nobody has told of yet."""


def upgrade() -> None:
    """Add columns, indexes and tables, then show them."""
    for table, name, kind, comment in COLUMNS:
        op.add_column(table, sa.Column(name, kind, comment=comment))
    for index, table, columns, kept in INDEXES:
        op.create_index(index, table, list(columns), sqlite_where=sa.text(kept), postgresql_where=sa.text(kept))
    op.create_table(
        "rubrics",
        sa.Column("project", sa.Text, primary_key=True, comment="J: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="J: hash of what follows"),
        sa.Column("text", sa.Text, nullable=False, comment="J: what makes an attempt better than another"),
        sa.Column("parts", Json, comment="J: {name: weight} of the parts that are scored; NULL for one score"),
        comment="what judges were told to go by",
    )
    op.create_table(
        "judgements",
        sa.Column("project", sa.Text, primary_key=True, comment="J: the tenant"),
        sa.Column("id", sa.Text, primary_key=True, comment="J: hash of group, attempts, rubric and place"),
        sa.Column("group_id", sa.Text, nullable=False, comment="J"),
        sa.Column("policy", sa.Text, nullable=False, comment="J: the group's"),
        sa.Column(
            "attempts_hash", sa.Text, nullable=False, comment="J: hash of the attempts and the rubric it is about"
        ),
        sa.Column("place", sa.Integer, nullable=False, comment="J: which of the group's judgements, from 0"),
        sa.Column("section", sa.Integer, nullable=False, comment="J: which part of a large group it is about, from 0"),
        sa.Column("purpose", sa.Text, nullable=False, comment="J: reward | drift: whether its scores make rewards"),
        sa.Column("state", sa.Text, nullable=False, comment="J: waiting | accepted"),
        sa.Column(
            "judge", sa.Text, nullable=False, comment="J: its name in the settings; of a waiting one, who is asked next"
        ),
        sa.Column("model", sa.Text, comment="J: as its provider calls the one that answered"),
        sa.Column("rubric_hash", sa.Text, nullable=False, comment="J: id of its rubric"),
        sa.Column("cache_key", sa.Text, comment="J: equal where the answer may be used again; NULL until accepted"),
        sa.Column("cached_from", sa.Text, comment="J: the judgement whose answer this one uses again"),
        sa.Column(
            "scores",
            Json,
            comment="J: {trajectory_id: {score, explanation, parts, position, attempt}}; position as shown, from 0",
        ),
        sa.Column("calls", sa.Integer, nullable=False, comment="J: answers asked for"),
        sa.Column("refusals", sa.Integer, nullable=False, comment="J: answers of `judge` that were refused"),
        sa.Column("error", sa.Text, comment="J: why the last call gave nothing"),
        sa.Column(
            "left_out", sa.Integer, nullable=False, comment="J: characters of the attempts that it was not shown"
        ),
        sa.Column("prompt_tokens", sa.Integer, nullable=False, comment="J: over all its calls, as the provider counts"),
        sa.Column("completion_tokens", sa.Integer, nullable=False, comment="J: likewise"),
        sa.Column("cost_usd", sa.Float, comment="J: over all its calls; NULL where the price is unknown"),
        sa.Column("seconds", sa.Float, comment="J: of the call that was accepted"),
        sa.Column("created_at", Utc, nullable=False, comment="J"),
        sa.Column("accepted_at", Utc, comment="J"),
        sa.ForeignKeyConstraint(
            ["project", "rubric_hash"], ["rubrics.project", "rubrics.id"], name="fk_judgements_rubrics"
        ),
        sa.Index("ix_judgements_project_group_id", "project", "group_id"),
        _where("ix_judgements_cache", "project", "cache_key", where="cache_key IS NOT NULL"),
        _where("ix_judgements_accepted", "project", "policy", "accepted_at", where="accepted_at IS NOT NULL"),
        comment="what judges said: one row for each answer that a group needs",
    )
    op.create_table(
        "judge_days",
        sa.Column("project", sa.Text, primary_key=True, comment="J: the tenant"),
        sa.Column("policy", sa.Text, primary_key=True, comment="J: whose groups were judged"),
        sa.Column("day", sa.Text, primary_key=True, comment="J: UTC, YYYY-MM-DD"),
        sa.Column("judge", sa.Text, primary_key=True, comment="J: its name in the settings"),
        sa.Column("calls", sa.Integer, nullable=False, comment="J: answers asked for"),
        sa.Column("refused", sa.Integer, nullable=False, comment="J: answers that could not be accepted"),
        sa.Column("failed", sa.Integer, nullable=False, comment="J: calls without an answer"),
        sa.Column("tokens", sa.Integer, nullable=False, comment="J: read and written"),
        sa.Column("cost_usd", sa.Float, nullable=False, comment="J: as far as prices are known"),
        comment="what judging took each day",
    )
    _comment(after=True)
    _show(ADMIN_GROUPS_JUDGED)
    dialect = op.get_bind().dialect.name
    shown = {
        "admin_judgements": JUDGED.format(**WORDS[dialect]),
        "admin_judge_drift": DRIFT.format(day=DAYS[dialect]),
        "admin_judge_days": ADMIN_JUDGE_DAYS,
        "admin_reviews": ADMIN_REVIEWS,
    }
    for view, query in shown.items():
        op.execute(sa.text(f"CREATE VIEW {view} AS {query}"))


def downgrade() -> None:
    """Drop them again, and what they held."""
    for view in ("admin_reviews", "admin_judge_days", "admin_judge_drift", "admin_judgements"):
        op.execute(sa.text(f"DROP VIEW {view}"))
    _show(ADMIN_GROUPS)
    _comment(after=False)
    for table in ("judge_days", "judgements", "rubrics"):
        op.drop_table(table)
    for index, table, _, _ in INDEXES:
        op.drop_index(index, table)
    for table, name, _, _ in COLUMNS:
        op.drop_column(table, name)


def _show(query: str) -> None:
    op.execute(sa.text("DROP VIEW admin_groups"))
    op.execute(sa.text(f"CREATE VIEW admin_groups AS {query}"))


def _comment(*, after: bool) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite keeps no comments
        for (table, column), comments in COMMENTS.items():
            op.alter_column(table, column, comment=comments[after], existing_comment=comments[not after])


def _where(name: str, *columns: str, where: str) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
