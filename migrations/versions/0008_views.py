"""Views that say the day, what a step took of each trajectory, and what judges were told to go by."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

DAY = {"sqlite": "substr({at}, 1, 10)", "postgresql": "to_char({at} AT TIME ZONE 'UTC', 'YYYY-MM-DD')"}
"""The day of an instant in UTC, as text that both databases write and sort alike."""

COMPLETIONS = """
    SELECT project, id AS completion_id, upstream_id, trajectory_id, turn, choice, policy, policy_version, endpoint,
           status, error, call_id, follows, key_id, end_user, new_messages, tools, response, response_text,
           why_not_trained, prompt_token_ids, token_ids, inference_logprobs, sampling, finish_reason, prompt_tokens,
           completion_tokens, streamed, ttft_ms, total_ms, retry_of, threaded_by, redactions, {day}created_at
    FROM completions
"""
# Whether its policy trains is not the trajectory's to remember: it would be wrong as soon as somebody switches.
TRAJECTORIES = """
    SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.split, t.state, t.reward,
           t.reward_source, t.first_version, t.last_version, t.completions, t.sampled_tokens,
           CASE WHEN t.why_not_trained = 'waiting_step' AND p.state <> 'training' THEN 'policy_not_training'
                ELSE t.why_not_trained END AS why_not_trained,
           t.trained_in_step, t.metadata, t.no_train, t.continues, t.end_user, t.code_parts, t.code_error,
           {prompt_hash}{day}t.created_at, t.last_seen_at, t.ended_at
    FROM trajectories AS t
    LEFT JOIN policies AS p ON p.project = t.project AND p.id = t.policy
"""
FEEDBACK = """
    SELECT project, id AS feedback_id, target_kind, target_id, choice, trajectory_id, completion_id, reward,
           rewards, parts, demonstration, judge, source, final, comment, metadata, {key_id}state, reason, step,
           {day}created_at, applied_at, withdrawn_at
    FROM feedback
"""
STEPS = """
    SELECT project, policy, number AS step, coalesce(kind, 'grpo') AS kind, state, version_in, version_out, groups,
           trajectories, baselined, reward_mean, reward_spread, advantage_spread, loss_function, loss, kl, entropy,
           mismatch_k3, fresh_share, masked_share, grad_norm, learning_rate, completions, rows, sampled_tokens,
           read_tokens, tokens_per_s, seconds, phases, discarded, config, error, kept, attempt, asked_at, imitates,
           {day}created_at, ended_at
    FROM steps
"""
# A row for each attempt and judgement; cost and tokens are its share of them, so that they can be summed.
JUDGED = """
    SELECT j.project, j.id AS judgement_id, j.group_id, s.key AS trajectory_id, j.policy, j.judge, j.model, j.purpose,
           {score} AS score, {explanation} AS explanation, {parts} AS parts, {position} AS position,
           j.rubric_hash, j.attempts_hash, j.place, j.section, j.cached_from,
           j.cost_usd / {attempts} AS cost_usd,
           {tokens} AS tokens,
           j.calls, j.left_out, j.seconds, {day}j.created_at, j.accepted_at
    FROM judgements AS j CROSS JOIN {each} AS s
    WHERE j.state = 'accepted'
"""
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
# The share of pairs of attempts that a policy's judges and its strong one rank alike (a tie is half of one), and by
# how much the judges score higher.
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
           {agreement} AS agreement,
           avg(a.score - a.strong_score + b.score - b.strong_score) / 2 AS difference
    FROM both_said AS a
    JOIN both_said AS b ON b.project = a.project AND b.group_id = a.group_id AND b.day = a.day
                       AND b.trajectory_id > a.trajectory_id
    WHERE a.score IS NOT NULL AND a.strong_score IS NOT NULL AND b.score IS NOT NULL AND b.strong_score IS NOT NULL
    GROUP BY a.project, a.policy, a.day
"""
AGREEMENT = """avg(CASE WHEN (a.score - b.score) * (a.strong_score - b.strong_score) > 0 THEN 1.0
                    WHEN a.score = b.score OR a.strong_score = b.strong_score THEN 0.5
                    ELSE 0.0 END)"""
TOKENS = "(j.prompt_tokens + j.completion_tokens) * 1.0 / {attempts}"
DRIFT_DAYS_BEFORE = {
    "sqlite": "date(accepted_at)",
    "postgresql": "CAST((accepted_at AT TIME ZONE 'UTC') AS date)",
}
ADMIN_STEP_TRAJECTORIES = """
    SELECT x.project, x.policy, s.number AS step, x.trajectory_id, x.group_id, x.reward, x.advantage, x.baseline,
           x.staleness
    FROM step_trajectories AS x
    JOIN steps AS s ON s.project = x.project AND s.id = x.step_id
"""
ADMIN_RUBRICS = "SELECT project, id AS rubric_hash, text, parts FROM rubrics"


def upgrade() -> None:
    """Show them."""
    _show(after=True)
    op.execute(sa.text(f"CREATE VIEW admin_step_trajectories AS {ADMIN_STEP_TRAJECTORIES}"))
    op.execute(sa.text(f"CREATE VIEW admin_rubrics AS {ADMIN_RUBRICS}"))


def downgrade() -> None:
    """Show what was shown before."""
    op.execute(sa.text("DROP VIEW admin_rubrics"))
    op.execute(sa.text("DROP VIEW admin_step_trajectories"))
    _show(after=False)


def _show(*, after: bool) -> None:
    dialect = op.get_bind().dialect.name

    def day(table: str = "") -> str:
        return DAY[dialect].format(at=f"{table}created_at") + " AS day, " if after else ""

    def real(number: str) -> str:
        # PostgreSQL would say numeric, which programs read as another kind of number.
        return f"CAST({number} AS double precision)" if after else number

    drift_day = DAY[dialect].format(at="accepted_at") if after else DRIFT_DAYS_BEFORE[dialect]
    tokens = real(TOKENS.format(attempts=WORDS[dialect]["attempts"]))
    queries = {
        "admin_completions": COMPLETIONS.format(day=day()),
        "admin_trajectories": TRAJECTORIES.format(day=day("t."), prompt_hash="t.prompt_hash, " if after else ""),
        "admin_feedback": FEEDBACK.format(day=day(), key_id="key_id, " if after else ""),
        "admin_steps": STEPS.format(day=day()),
        "admin_judgements": JUDGED.format(day=day("j."), tokens=tokens, **WORDS[dialect]),
        "admin_judge_drift": DRIFT.format(day=drift_day, agreement=real(AGREEMENT)),
    }
    for view in reversed(queries):  # a view goes before the one that it reads
        op.execute(sa.text(f"DROP VIEW {view}"))
    for view, query in queries.items():
        op.execute(sa.text(f"CREATE VIEW {view} AS {query}"))
