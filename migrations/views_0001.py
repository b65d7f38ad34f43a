"""The admin views as revision 0001 makes them. Frozen: a later revision that changes a view brings its own text.

Plain SQL for sqlite3, psql and any BI tool. Both databases share all but the type of what is a list or an object:
JSON text on SQLite; `integer[]`, `real[]`, `jsonb` on PostgreSQL. `admin_conversations` needs each one's own words.
"""

SHARED = {
    "admin_policies": """
        SELECT project, id AS policy, base_model, live_version, state, model_path, created_at
        FROM policies
    """,
    "admin_versions": """
        SELECT project, policy, version, parent, state, reason, step, probe_k3, served, adapter_path,
               created_at, promoted_at
        FROM policy_versions
    """,
    "admin_completions": """
        SELECT project, id AS completion_id, upstream_id, trajectory_id, turn, choice, policy, policy_version, endpoint,
               status, error, call_id, follows, key_id, end_user, new_messages, tools, response, response_text,
               why_not_trained, prompt_token_ids, token_ids, inference_logprobs, sampling, finish_reason, prompt_tokens,
               completion_tokens, streamed, ttft_ms, total_ms, retry_of, threaded_by, created_at
        FROM completions
    """,
    # Whether its policy trains is not the trajectory's to remember: it would be wrong as soon as somebody switches.
    "admin_trajectories": """
        SELECT t.project, t.id AS trajectory_id, t.group_id, t.policy, t.task, t.split, t.state, t.reward,
               t.reward_source, t.first_version, t.last_version, t.completions, t.sampled_tokens,
               CASE WHEN t.why_not_trained = 'waiting_step' AND p.state <> 'training' THEN 'policy_not_training'
                    ELSE t.why_not_trained END AS why_not_trained,
               t.trained_in_step, t.metadata, t.no_train, t.created_at, t.last_seen_at, t.ended_at
        FROM trajectories AS t
        LEFT JOIN policies AS p ON p.project = t.project AND p.id = t.policy
    """,
    "admin_groups": """
        SELECT project, id AS group_id, policy, formed_by, state, reason, size, rewarded, reward_mean, reward_spread,
               step, created_at, closed_at
        FROM groups
    """,
    "admin_feedback": """
        SELECT project, id AS feedback_id, target_kind, target_id, choice, trajectory_id, completion_id, reward,
               rewards, source, final, comment, metadata, state, reason, step, created_at, applied_at
        FROM feedback
    """,
    "admin_steps": """
        SELECT project, policy, number AS step, state, version_in, version_out, groups, trajectories, reward_mean,
               reward_spread, loss, kl, entropy, mismatch_k3, fresh_share, masked_share, grad_norm, sampled_tokens,
               tokens_per_s, seconds, phases, config, error, attempt, created_at, ended_at
        FROM steps
    """,
}

# A turn's conversation is walked from the turn up to its first ancestor, so that a query for one trajectory reads one
# trajectory. `up` counts the links from the turn; `part` puts a link's answer after its messages.
CONVERSATIONS_SQLITE = """
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
"""

CONVERSATIONS_POSTGRESQL = """
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
"""


def views(dialect: str) -> dict[str, str]:
    """Name and query of every view, for `sqlite` or `postgresql`."""
    own = {"sqlite": CONVERSATIONS_SQLITE, "postgresql": CONVERSATIONS_POSTGRESQL}
    return {**SHARED, "admin_conversations": own[dialect]}
