"""The words of an answer are stored once: the view reads them out of `response` where `response_text` has none.

Rows that are there keep both, and read the same.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

CONTENT = {
    # What is nested too deeply for SQLite would fail whoever reads any row; of a list json_extract tells JSON text.
    "sqlite": (
        "CASE WHEN NOT json_valid(response) THEN NULL "
        "WHEN json_type(response, '$.content') = 'text' THEN json_extract(response, '$.content') END"
    ),
    "postgresql": "CASE WHEN jsonb_typeof(response -> 'content') = 'string' THEN response ->> 'content' END",
}
"""The string at `response.content`; NULL where there is none."""
DAY = {"sqlite": "substr(created_at, 1, 10)", "postgresql": "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')"}
COMPLETIONS = """
    SELECT project, id AS completion_id, upstream_id, trajectory_id, turn, choice, policy, policy_version, endpoint,
           status, error, call_id, follows, key_id, end_user, new_messages, tools, response,
           {response_text}, why_not_trained, prompt_token_ids, token_ids, inference_logprobs,
           sampling, finish_reason, prompt_tokens, completion_tokens, streamed, ttft_ms, total_ms, retry_of,
           threaded_by, redactions, {day} AS day, created_at
    FROM completions
"""
COMMENTS = "P: its content", "P: its text, where `response` does not have that as its content"
"""Of `response_text`, before and after."""


def upgrade() -> None:
    """Have the view read them there."""
    _show(after=True)


def downgrade() -> None:
    """Store them twice again, which is what the programs before read."""
    content = CONTENT[op.get_bind().dialect.name]
    missing = f"response_text IS NULL AND {content} IS NOT NULL"
    op.execute(sa.text(f"UPDATE completions SET response_text = {content} WHERE {missing}"))
    _show(after=False)


def _show(*, after: bool) -> None:
    dialect = op.get_bind().dialect.name
    # Whatever is compared with it is compared as text, as with the column itself.
    words = f"CAST(coalesce(response_text, {CONTENT[dialect]}) AS text) AS response_text" if after else "response_text"
    query = COMPLETIONS.format(response_text=words, day=DAY[dialect])
    if dialect == "sqlite":
        op.execute(sa.text("DROP VIEW admin_completions"))
        op.execute(sa.text(f"CREATE VIEW admin_completions AS {query}"))
    else:  # its columns stay as they are, and so may views that read it; SQLite keeps no comments
        op.execute(sa.text(f"CREATE OR REPLACE VIEW admin_completions AS {query}"))
        own, other = COMMENTS[after], COMMENTS[not after]
        op.alter_column("completions", "response_text", comment=own, existing_comment=other)
