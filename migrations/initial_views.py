"""The admin views of the first release. Frozen: a later revision that changes a view brings its own text.

Plain SQL for sqlite3, psql and any BI tool. Both databases share most of it. They differ in the type of lists and
objects: JSON text on SQLite; `integer[]`, `real[]`, `jsonb` on PostgreSQL. A name in braces, as `{day}`, stands for the
database's own words.
"""

SHARED = {
    "admin_policies": """
        SELECT project, id AS policy, base_model, live_version, state, model_path, upstream, aliases, self_test,
               self_tested_at, created_at
        FROM policies
    """,
    "admin_versions": """
        SELECT v.project, v.policy, v.version, v.parent, v.state, v.reason, v.step, v.origin, v.probe_k3,
               v.heldout_mean, v.heldout_count, v.tested_by, v.tested_since, v.canary_share, v.served, v.pinned_at,
               v.adapter_path, v.created_at, v.promoted_at, v.unserved_at, v.removed_at
        FROM policy_versions AS v
    """,
    "admin_gate_results": """
        SELECT project, policy, version, against, test, decision, reason, figures, created_at
        FROM gate_results
    """,
    # What is compared with `response_text` is compared as text, as with the column itself.
    "admin_completions": """
        SELECT project, id AS completion_id, upstream_id, trajectory_id, turn, choice, policy, policy_version, endpoint,
               status, error, call_id, follows, key_id, end_user, new_messages, tools, response,
               CAST(coalesce(response_text, {content}) AS text) AS response_text, why_not_trained, prompt_token_ids,
               token_ids, inference_logprobs, sampling, finish_reason, prompt_tokens, completion_tokens, streamed,
               ttft_ms, total_ms, retry_of, threaded_by, redactions, {day} AS day, created_at
        FROM completions
    """,
    # Whether its policy trains is not the trajectory's to remember: it would be wrong as soon as somebody switches.
    "admin_trajectories": """
        SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.split, t.state, t.reward,
               t.reward_source, t.first_version, t.last_version, t.completions, t.sampled_tokens,
               CASE WHEN t.why_not_trained = 'waiting_step' AND p.state <> 'training' THEN 'policy_not_training'
                    ELSE t.why_not_trained END AS why_not_trained,
               t.trained_in_step, t.metadata, t.no_train, t.continues, t.end_user, t.code_parts, t.code_error,
               t.prompt_hash, {day_of_t} AS day, t.created_at, t.last_seen_at, t.ended_at
        FROM trajectories AS t
        LEFT JOIN policies AS p ON p.project = t.project AND p.id = t.policy
    """,
    "admin_groups": """
        SELECT project, id AS group_id, policy, formed_by, state, reason, size, rewarded, reward_mean, reward_spread,
               compared_with, step, judged_at, judge_noise, judge_waits, created_at, closed_at
        FROM groups
    """,
    "admin_feedback": """
        SELECT project, id AS feedback_id, target_kind, target_id, choice, trajectory_id, completion_id, reward,
               rewards, parts, demonstration, judge, source, final, comment, metadata, key_id, state, reason, step,
               {day} AS day, created_at, applied_at, withdrawn_at
        FROM feedback
    """,
    # A row for each attempt and judgement; cost and tokens are its share of them, so that they can be summed.
    "admin_judgements": """
        SELECT j.project, j.id AS judgement_id, j.group_id, s.key AS trajectory_id, j.policy, j.judge, j.model,
               j.purpose, {score} AS score, {explanation} AS explanation, {parts} AS parts, {position} AS position,
               j.rubric_hash, j.attempts_hash, j.place, j.section, j.cached_from,
               j.cost_usd / {attempts} AS cost_usd,
               CAST((j.prompt_tokens + j.completion_tokens) * 1.0 / {attempts} AS double precision) AS tokens,
               j.calls, j.left_out, j.seconds, {day_of_j} AS day, j.created_at, j.accepted_at
        FROM judgements AS j CROSS JOIN {each_score} AS s
        WHERE j.state = 'accepted'
    """,
    "admin_rubrics": "SELECT project, id AS rubric_hash, text, parts FROM rubrics",
    "admin_judge_days": """
        SELECT project, policy, day, judge, calls, refused, failed, tokens, cost_usd FROM judge_days
    """,
    # The share of pairs of attempts that a policy's judges and its strong one rank alike (a tie is half of one), and
    # by how much the judges score higher.
    "admin_judge_drift": """
        WITH both_said AS (
            SELECT project, policy, group_id, trajectory_id, min({day_accepted}) AS day,
                   avg(CASE WHEN purpose = 'reward' THEN score END) AS score,
                   avg(CASE WHEN purpose = 'drift' THEN score END) AS strong_score
            FROM admin_judgements
            GROUP BY project, policy, group_id, attempts_hash, trajectory_id
        )
        SELECT a.project, a.policy, a.day, count(DISTINCT a.group_id) AS groups,
               count(*) AS pairs,
               CAST(avg(CASE WHEN (a.score - b.score) * (a.strong_score - b.strong_score) > 0 THEN 1.0
                             WHEN a.score = b.score OR a.strong_score = b.strong_score THEN 0.5
                             ELSE 0.0 END) AS double precision) AS agreement,
               avg(a.score - a.strong_score + b.score - b.strong_score) / 2 AS difference
        FROM both_said AS a
        JOIN both_said AS b ON b.project = a.project AND b.group_id = a.group_id AND b.day = a.day
                           AND b.trajectory_id > a.trajectory_id
        WHERE a.score IS NOT NULL AND a.strong_score IS NOT NULL AND b.score IS NOT NULL AND b.strong_score IS NOT NULL
        GROUP BY a.project, a.policy, a.day
    """,
    # What was drawn for people to look at and has no feedback of theirs yet.
    "admin_reviews": """
        SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.reward, t.reward_source, t.review_at
        FROM trajectories AS t
        WHERE t.review_at IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM feedback AS f
            WHERE f.project = t.project AND f.trajectory_id = t.id AND f.created_at >= t.review_at
              AND f.source IN ('reward', 'thumbs', 'parts') AND f.withdrawn_at IS NULL
        )
    """,
    "admin_steps": """
        SELECT project, policy, number AS step, coalesce(kind, 'grpo') AS kind, state, version_in, version_out, groups,
               trajectories, baselined, reward_mean, reward_spread, advantage_spread, loss_function, loss, kl, entropy,
               mismatch_k3, fresh_share, masked_share, grad_norm, learning_rate, completions, rows, sampled_tokens,
               read_tokens, tokens_per_s, seconds, phases, discarded, config, error, kept, attempt, asked_at, imitates,
               {day} AS day, created_at, ended_at
        FROM steps
    """,
    "admin_step_trajectories": """
        SELECT x.project, x.policy, s.number AS step, x.trajectory_id, x.group_id, x.reward, x.advantage, x.baseline,
               x.staleness
        FROM step_trajectories AS x
        JOIN steps AS s ON s.project = x.project AND s.id = x.step_id
    """,
    "admin_examples": """
        SELECT project, policy, source, source_id, trajectory_id, completion_id, prompt_token_ids, token_ids, left_out,
               step, created_at
        FROM examples
    """,
    "admin_baselines": "SELECT project, policy, task, end_user, mean, count, updated_at FROM baselines",
    "admin_keys": """
        SELECT project, id AS key_id, name, scopes, created_at, expires_at, revoked_at, last_used_at, requests_per_min,
               tokens_per_min
        FROM api_keys
    """,
    "admin_replicas": "SELECT project, id AS replica, state, adapters, reason, seen_at FROM replicas",
    "admin_erasures": """
        SELECT project, id AS erasure_id, kind, target, asked_at, finished_at, trajectories, completions, versions,
               waits_for
        FROM erasures
    """,
}
"""A view stands after those that it reads."""

_DAY = {"sqlite": "substr({at}, 1, 10)", "postgresql": "to_char({at} AT TIME ZONE 'UTC', 'YYYY-MM-DD')"}
"""The day of an instant in UTC, as text that both databases write and sort alike."""
_WORDS = {
    "sqlite": {
        # What is nested too deeply for SQLite would fail whoever reads any row. Of a list json_extract gives JSON text.
        "content": (
            "CASE WHEN NOT json_valid(response) THEN NULL "
            "WHEN json_type(response, '$.content') = 'text' THEN json_extract(response, '$.content') END"
        ),
        "score": "json_extract(s.value, '$.score')",
        "explanation": "json_extract(s.value, '$.explanation')",
        "parts": "json_extract(s.value, '$.parts')",
        "position": "json_extract(s.value, '$.position')",
        "attempts": "(SELECT count(*) FROM json_each(j.scores))",
        "each_score": "json_each(j.scores)",
    },
    "postgresql": {
        "content": "CASE WHEN jsonb_typeof(response -> 'content') = 'string' THEN response ->> 'content' END",
        "score": "CAST(s.value ->> 'score' AS double precision)",
        "explanation": "s.value ->> 'explanation'",
        "parts": "s.value -> 'parts'",
        "position": "CAST(s.value ->> 'position' AS integer)",
        "attempts": "(SELECT count(*) FROM jsonb_object_keys(j.scores))",
        "each_score": "jsonb_each(j.scores)",
    },
}
"""`content` is the string at `response.content`, or NULL. The others take an accepted judgement's scores apart."""

# A turn's conversation is walked from the turn up to its first ancestor, so that a query for one trajectory reads one
# trajectory. `up` counts the links from the turn; `part` puts a link's answer after its messages.
CONVERSATIONS = {
    "sqlite": """
    SELECT c.project, c.trajectory_id, c.turn, c.id AS completion_id,
        (WITH RECURSIVE chain (up, new_messages, response, follows) AS (
            SELECT 0, c.new_messages, NULL, c.follows
            UNION ALL
            SELECT chain.up + 1, a.new_messages, a.response, a.follows
            FROM chain JOIN completions AS a ON a.project = c.project AND a.id = chain.follows
        )
        SELECT json_group_array(json(message)) FROM (
            SELECT up, 0 AS part, m.key AS place, CASE m.type WHEN 'object' THEN m.value ELSE json_quote(m.value) END
                   AS message
            FROM chain, json_each(chain.new_messages) AS m
            UNION ALL
            SELECT up, 1, 0, response FROM chain WHERE response IS NOT NULL
            ORDER BY 1 DESC, 2, 3
        )) AS messages,
        (WITH RECURSIVE chain (up, prompt_token_ids, token_ids, follows) AS (
            SELECT 0, c.prompt_token_ids, NULL, c.follows
            UNION ALL
            SELECT chain.up + 1, a.prompt_token_ids, a.token_ids, a.follows
            FROM chain JOIN completions AS a ON a.project = c.project AND a.id = chain.follows
        )
        SELECT json_group_array(token) FROM (
            SELECT up, 0 AS part, i.key AS place, i.value AS token FROM chain, json_each(chain.prompt_token_ids) AS i
            UNION ALL
            SELECT up, 1, i.key, i.value FROM chain, json_each(chain.token_ids) AS i
            ORDER BY 1 DESC, 2, 3
        )) AS prompt_token_ids
    FROM completions AS c
""",
    "postgresql": """
    SELECT c.project, c.trajectory_id, c.turn, c.id AS completion_id,
        (WITH RECURSIVE chain (up, new_messages, response, follows) AS (
            SELECT 0, c.new_messages, NULL::jsonb, c.follows
            UNION ALL
            SELECT chain.up + 1, a.new_messages, a.response, a.follows
            FROM chain JOIN completions AS a ON a.project = c.project AND a.id = chain.follows
        )
        SELECT coalesce(jsonb_agg(message ORDER BY up DESC, part, place), '[]') FROM (
            SELECT up, 0 AS part, m.place, m.message
            FROM chain, jsonb_array_elements(chain.new_messages) WITH ORDINALITY AS m (message, place)
            UNION ALL
            SELECT up, 1, 0, response FROM chain WHERE response IS NOT NULL
        ) AS link) AS messages,
        (WITH RECURSIVE chain (up, prompt_token_ids, token_ids, follows) AS (
            SELECT 0, c.prompt_token_ids, NULL::integer[], c.follows
            UNION ALL
            SELECT chain.up + 1, a.prompt_token_ids, a.token_ids, a.follows
            FROM chain JOIN completions AS a ON a.project = c.project AND a.id = chain.follows
        )
        SELECT coalesce(array_agg(token ORDER BY up DESC, part, place), '{}') FROM (
            SELECT up, 0 AS part, i.place, i.token
            FROM chain, unnest(chain.prompt_token_ids) WITH ORDINALITY AS i (token, place)
            UNION ALL
            SELECT up, 1, i.place, i.token FROM chain, unnest(chain.token_ids) WITH ORDINALITY AS i (token, place)
        ) AS link) AS prompt_token_ids
    FROM completions AS c
""",
}


def statements(dialect: str) -> list[str]:
    """Return what creates every view, on `sqlite` or `postgresql`."""
    day = _DAY[dialect]
    words = {
        **_WORDS[dialect],
        "day": day.format(at="created_at"),
        "day_of_t": day.format(at="t.created_at"),
        "day_of_j": day.format(at="j.created_at"),
        "day_accepted": day.format(at="accepted_at"),
    }
    shared = [f"CREATE VIEW {name} AS {query.format(**words)}" for name, query in SHARED.items()]
    return [*shared, f"CREATE VIEW admin_conversations AS {CONVERSATIONS[dialect]}"]


def extended(dialect: str, name: str, last: str, added: str) -> list[str]:
    """Return what makes a view of the first release again, with columns `added` (comma-separated) after its `last`.

    A later revision that extends the same view has to name the columns of the earlier ones too.
    """
    (created,) = (one for one in statements(dialect) if one.startswith(f"CREATE VIEW {name} "))
    view = created.replace(f"{last}\n        FROM", f"{last}, {added}\n        FROM")
    # A colon begins no parameter in them.
    view = view.replace(":", r"\:")
    if dialect == "sqlite":
        return [f"DROP VIEW {name}", view]
    # A view that is replaced keeps its grants, and the views that read it.
    return [view.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1)]
