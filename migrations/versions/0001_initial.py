"""The tables, the roll-ups and the admin views of the first release.

Frozen: a later change of the tables is a revision of its own. The id stays what it was before the history became one
revision, so that a database of the last version before the release goes on as it is.
"""

import sqlalchemy as sa
from alembic import op

from migrations import initial_rollups, initial_views
from whetstone.database.types import Json, Logprobs, TokenIds, Utc

revision = "0011"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, each after those that it refers to, then roll-ups, triggers and views."""
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, nullable=False, comment="W: the tenant; `default` on one machine"),
        sa.Column("created_at", Utc, nullable=False, comment="W"),
        sa.Column(
            "pause_id",
            sa.Text,
            comment="T: the step that has the accelerator, which vLLM shares; NULL while vLLM has it",
        ),
        sa.Column("pause_until", Utc, comment="T: vLLM may have it back from then on, whatever became of the step"),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        comment="tenants",
    )
    op.create_table(
        "api_keys",
        sa.Column("project", sa.Text, nullable=False, comment="W, P: the tenant that it leads to"),
        sa.Column("id", sa.Text, nullable=False, comment="W, P: 12 of a-z and 0-9, no secret; part of the key's text"),
        sa.Column("name", sa.Text, nullable=False, comment="W, P: what it is for, in words"),
        sa.Column(
            "secret_sha256", sa.Text, nullable=False, comment="W, P: hash of the key's whole text, which nobody keeps"
        ),
        sa.Column(
            "scopes", Json, nullable=False, comment="W, P: list of inference | feedback | admin; admin has them all"
        ),
        sa.Column("created_at", Utc, nullable=False, comment="W, P"),
        sa.Column("expires_at", Utc, comment="W, P: it opens nothing from then on; NULL: it does not end by itself"),
        sa.Column("revoked_at", Utc, comment="W, P: when it was taken back; NULL while it stands"),
        sa.Column(
            "last_used_at", Utc, comment="P: the minute of the last request that came with it; NULL until one has"
        ),
        sa.Column("requests_per_min", sa.Integer, comment="W, P: most requests a minute; NULL: no limit"),
        sa.Column("tokens_per_min", sa.Integer, comment="W, P: most tokens a minute, read and sampled; NULL: no limit"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_api_keys_projects"),
        sa.UniqueConstraint("secret_sha256", name="uq_api_keys_secret_sha256"),
        comment="API keys as hashes: what opens the proxy, and how far",
    )
    op.create_table(
        "ui_sessions",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant that is looked at"),
        sa.Column("id", sa.Text, nullable=False, comment="P: hash of the token that the browser holds"),
        sa.Column("key_id", sa.Text, nullable=False, comment="P: the key that signed in; when it ends, so does this"),
        sa.Column("created_at", Utc, nullable=False, comment="P"),
        sa.Column("expires_at", Utc, nullable=False, comment="P: the session ends then"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_ui_sessions"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_ui_sessions_projects"),
        sa.UniqueConstraint("id", name="uq_ui_sessions_id"),
        comment="who has signed in at the dashboard",
    )
    op.create_table(
        "policies",
        sa.Column("project", sa.Text, nullable=False, comment="W: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="W: the name apps ask for as `model`"),
        sa.Column("base_model", sa.Text, nullable=False, comment="W: the name vLLM serves the base model under"),
        sa.Column("model_path", sa.Text, nullable=False, comment="W: folder or hub name of the base model's weights"),
        sa.Column(
            "live_version", sa.Integer, nullable=False, comment="W, T, P: the version that answers; 0 is the base model"
        ),
        sa.Column(
            "next_version", sa.Integer, nullable=False, comment="T, W: the number the next version gets; never reused"
        ),
        sa.Column("next_step", sa.Integer, nullable=False, comment="T: the number the next step gets; never reused"),
        sa.Column("state", sa.Text, nullable=False, comment="W: recording | training | paused"),
        sa.Column("created_at", Utc, nullable=False, comment="W"),
        sa.Column("upstream", sa.Text, comment="W: another server of the settings that answers; NULL where vLLM does"),
        sa.Column("aliases", Json, comment="W: list of other names that apps may ask for"),
        sa.Column("self_test", Json, comment="W: what `whetstone doctor` found out about the model"),
        sa.Column("self_tested_at", Utc, comment="W"),
        sa.Column("step_asked", Json, comment="P: the step asked for by hand: {kind, ...}; NULL while none is"),
        sa.Column("step_asked_at", Utc, comment="P: when it was asked for"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_policies"),
        sa.ForeignKeyConstraint(["project"], ["projects.id"], name="fk_policies_projects"),
        comment="names that apps may ask for as `model`: a base model and the line of adapters trained on it",
    )
    op.create_table(
        "policy_versions",
        sa.Column("project", sa.Text, nullable=False, comment="W, T: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="W, T: `policy@vN`; also the adapter's name in vLLM"),
        sa.Column("policy", sa.Text, nullable=False, comment="W, T"),
        sa.Column("version", sa.Integer, nullable=False, comment="W, T: 0 is the base model without adapter"),
        sa.Column("parent", sa.Integer, comment="T, W: the version the step started from; NULL for 0"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="W, T, P: building | candidate | live | retired | rejected"
        ),
        sa.Column("reason", sa.Text, comment="T, P, W: why rejected"),
        sa.Column("step", sa.Integer, comment="T: number of the step that made it; NULL for 0"),
        sa.Column("adapter_path", sa.Text, comment="T, W: folder of the LoRA files; NULL for 0"),
        sa.Column("manifest_sha256", sa.Text, comment="T, W: hash of the folder's manifest; NULL for 0"),
        sa.Column(
            "served", sa.Boolean, nullable=False, comment="T, P, W: vLLM is to keep it loaded; requests may name it"
        ),
        sa.Column("probe_k3", sa.Float, comment="T: nats, k3 between vLLM and the trainer on the probe's tokens"),
        sa.Column("created_at", Utc, nullable=False, comment="W, T"),
        sa.Column("promoted_at", Utc, comment="W, T, P: when it last became live"),
        sa.Column("probe_tokens", sa.Integer, comment="T, W: tokens sampled to probe it, or vLLM"),
        sa.Column(
            "origin",
            sa.Text,
            comment="W: where it is from if no step made it: the version it was forked from, or a path",
        ),
        sa.Column("pinned_at", Utc, comment="P, W: since when it is kept loaded by hand; NULL where it is not"),
        sa.Column("unserved_at", Utc, comment="P, T, W: when requests could no longer name it; NULL while they can"),
        sa.Column("removed_at", Utc, comment="T: when its folder was removed"),
        sa.Column("tested_by", sa.Text, comment="T: heldout | canary: the test that a candidate is in; NULL of others"),
        sa.Column("tested_since", Utc, comment="T: since when"),
        sa.Column(
            "canary_share", sa.Float, comment="T: share of new trajectories it answers as a candidate; NULL: none"
        ),
        sa.Column(
            "heldout_mean", sa.Float, comment="T: mean reward on the held-out prompts; NULL where it was not tested"
        ),
        sa.Column("heldout_count", sa.Integer, comment="T: how many prompts that were"),
        sa.Column("watched_at", Utc, comment="T: when its live rewards had been compared with its parent's for good"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_policy_versions"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_policy_versions_policies"
        ),
        sa.UniqueConstraint("project", "policy", "version", name="uq_policy_versions_project_policy_version"),
        comment="a policy's versions: the base model (0) and the adapters trained on it",
    )
    op.create_table(
        "groups",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P, J: given by the app, else made"),
        sa.Column("policy", sa.Text, nullable=False, comment="P, J: policy of its first completion"),
        sa.Column(
            "formed_by",
            sa.Text,
            nullable=False,
            comment="P, J: header | prompt | choices | shadow | evaluation | single",
        ),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P, J, T: open | closed | scored | claimed | trained | discarded"
        ),
        sa.Column("reason", sa.Text, comment="J, T: why discarded"),
        sa.Column("size", sa.Integer, nullable=False, comment="J: members when it closed; 0 while open"),
        sa.Column("rewarded", sa.Integer, nullable=False, comment="J: members with a reward"),
        sa.Column("reward_mean", sa.Float, comment="J: over its rewarded members"),
        sa.Column("reward_spread", sa.Float, comment="J: population standard deviation over its rewarded members"),
        sa.Column("step", sa.Integer, comment="T: number of the step that claimed it"),
        sa.Column("created_at", Utc, nullable=False, comment="P, J"),
        sa.Column("closed_at", Utc, comment="J"),
        sa.Column("due_at", Utc, comment="J: when to look at it next; NULL while nothing but a new member can move it"),
        sa.Column("prompt_hash", sa.Text, comment="J: of its members' first prompt, where that formed it"),
        sa.Column("target_size", sa.Integer, comment="P: X-Group-Size; NULL where the setting counts"),
        sa.Column("close_asked_at", Utc, comment="J: when the app asked to close it"),
        sa.Column(
            "compared_with",
            sa.Text,
            comment="J: group | baseline: what its rewards are measured against; NULL until scored",
        ),
        sa.Column("judge_asked_at", Utc, comment="J: when it was to be ranked by judges; NULL where nobody asked"),
        sa.Column("judge_due_at", Utc, comment="J: when judges are to look at it next; NULL while they are not"),
        sa.Column("judged_at", Utc, comment="J: when its members as they are were ranked"),
        sa.Column(
            "judge_noise", sa.Float, comment="J: by how much judges differ from themselves, as a standard deviation"
        ),
        sa.Column("judge_waits", sa.Text, comment="J: why it is not ranked yet"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_groups"),
        sa.ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"], name="fk_groups_policies"),
        sa.Index("ix_groups_project_created_at", "project", "created_at"),
        sa.Index("ix_groups_project_policy_state_closed_at", "project", "policy", "state", "closed_at"),
        _partial_index("ix_groups_due", "due_at", where="due_at IS NOT NULL"),
        _partial_index("ix_groups_judge_due", "judge_due_at", where="judge_due_at IS NOT NULL"),
        _partial_index(
            "ix_groups_prompt", "project", "policy", "prompt_hash", "created_at", where="prompt_hash IS NOT NULL"
        ),
        comment="trajectories that answer the same prompt and are compared with one another",
    )
    op.create_table(
        "trajectories",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P: given by the app, else made"),
        sa.Column("group_id", sa.Text, comment="P, J: NULL while it belongs to none"),
        sa.Column("policy", sa.Text, nullable=False, comment="P: policy of its first completion"),
        sa.Column("task", sa.Text, comment="P: the app's label"),
        sa.Column("split", sa.Text, nullable=False, comment="P: train | eval; eval is never trained on"),
        sa.Column("no_train", sa.Boolean, nullable=False, comment="P: the app asked not to train on it"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P, J, T: open | ended | rewarded | claimed | trained | excluded"
        ),
        sa.Column("reward", sa.Float, comment="J: the number it is trained on"),
        sa.Column(
            "reward_source",
            sa.Text,
            comment="J: trajectory | completions | group | judge | code | failure: what set it",
        ),
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
        sa.Column(
            "prompt_hash", sa.Text, comment="P: of its first prompt, tools and task; those that share it are grouped"
        ),
        sa.Column(
            "continues",
            sa.Text,
            comment="P: the completion it goes on from, of a trajectory that was over or went on elsewhere",
        ),
        sa.Column("end_user", sa.Text, comment="P: whom its first call was for"),
        sa.Column(
            "left_group_id", sa.Text, comment="J: the group it was moved from; feedback on that still counts for it"
        ),
        sa.Column("code_parts", Json, comment="J: {name: number}, what the policy's reward functions said"),
        sa.Column("code_error", sa.Text, comment="J: why a reward function said nothing"),
        sa.Column("code_due_at", Utc, comment="J: when the reward functions are to run; NULL while they are not"),
        sa.Column("review_at", Utc, comment="J: when it was drawn for people to look at; NULL for those that were not"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_trajectories"),
        sa.Index("ix_trajectories_project_created_at", "project", "created_at"),
        sa.Index("ix_trajectories_project_group_id", "project", "group_id"),
        _partial_index("ix_trajectories_code_due", "code_due_at", where="code_due_at IS NOT NULL"),
        _partial_index("ix_trajectories_continues", "project", "continues", where="continues IS NOT NULL"),
        _partial_index("ix_trajectories_ended", "project", "ended_at", "id", where="ended_at IS NOT NULL"),
        _partial_index("ix_trajectories_open", "last_seen_at", where="state = 'open'"),
        _partial_index("ix_trajectories_review", "project", "review_at", where="review_at IS NOT NULL"),
        _partial_index("ix_trajectories_unplaced", "created_at", where="placed_at IS NULL"),
        comment="attempts at something: their completions in order, and what each attempt was worth",
    )
    op.create_table(
        "completions",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P"),
        sa.Column(
            "upstream_id",
            sa.Text,
            nullable=False,
            comment="P: the answer's id, as the app holds it; shared by the choices",
        ),
        sa.Column("call_id", sa.Text, nullable=False, comment="P: shared by the choices of one call"),
        sa.Column("choice", sa.Integer, nullable=False, comment="P: place among the call's choices, from 0"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="P"),
        sa.Column("turn", sa.Integer, nullable=False, comment="P: its place in the trajectory, from 0"),
        sa.Column("policy", sa.Text, nullable=False, comment="P"),
        sa.Column("policy_version", sa.Integer, nullable=False, comment="P: the version that spoke"),
        sa.Column(
            "endpoint", sa.Text, nullable=False, comment="P: chat.completions | completions | messages | responses"
        ),
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
        sa.Column("response_text", sa.Text, comment="P: its text, where `response` does not have that as its content"),
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
            "threaded_by",
            sa.Text,
            nullable=False,
            comment="P: the rule that found the trajectory, one of docs/whose_call.md",
        ),
        sa.Column("why_not_trained", sa.Text, comment="P: what this completion lacks; NULL when it can be trained on"),
        sa.Column("created_at", Utc, nullable=False, comment="P: when the request arrived"),
        sa.Column("request_digest", sa.Text, comment="P: hash of a body not answered whole; its retry is found by it"),
        sa.Column("turn_key", sa.Text, comment="P: X-Turn-Id or Idempotency-Key; asked again, the answer is the same"),
        sa.Column("reply", sa.LargeBinary, comment="P: the answer as sent, where turn_key may ask for it again"),
        sa.Column(
            "history",
            sa.LargeBinary,
            comment="P: 16 bytes, hash of conversation and answer; what extends it is found by it",
        ),
        sa.Column(
            "tool_history",
            sa.LargeBinary,
            comment="P: 16 bytes, hash of the tool calls it made, ids included; likewise",
        ),
        sa.Column(
            "continued_by", sa.Text, comment="P: the first whole completion that extends it; NULL while none does"
        ),
        sa.Column(
            "redactions", sa.Integer, comment="P: pieces of its call taken out before writing; NULL where nobody looked"
        ),
        sa.PrimaryKeyConstraint("project", "id", name="pk_completions"),
        sa.ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            name="fk_completions_trajectories",
        ),
        sa.UniqueConstraint("project", "trajectory_id", "turn", name="uq_completions_project_trajectory_id_turn"),
        sa.Index("ix_completions_project_created_at", "project", "created_at"),
        sa.Index("ix_completions_project_upstream_id", "project", "upstream_id"),
        _partial_index("ix_completions_history", "project", "history", "id", where="history IS NOT NULL"),
        _partial_index("ix_completions_retry_of", "project", "retry_of", where="retry_of IS NOT NULL"),
        _partial_index(
            "ix_completions_tool_history", "project", "tool_history", "id", where="tool_history IS NOT NULL"
        ),
        _partial_index("ix_completions_turn_key", "project", "turn_key", where="turn_key IS NOT NULL"),
        _partial_index("ix_completions_unanswered", "project", "request_digest", where="request_digest IS NOT NULL"),
        comment="one choice of a served call each, with the very ids and logprobs vLLM returned",
    )
    op.create_table(
        "feedback",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P"),
        sa.Column("target_kind", sa.Text, nullable=False, comment="P: trajectory | completion | group"),
        sa.Column("target_id", sa.Text, nullable=False, comment="P: as the app gave it"),
        sa.Column("trajectory_id", sa.Text, comment="J: the trajectory it was applied to; NULL for a group"),
        sa.Column(
            "completion_id", sa.Text, comment="J: the completion it was applied to; NULL for a trajectory or a group"
        ),
        sa.Column("choice", sa.Integer, nullable=False, comment="P: which choice of a `chatcmpl-` id"),
        sa.Column("reward", sa.Float, comment="P: for a trajectory or completion; J: the weighted sum of its parts"),
        sa.Column("rewards", Json, comment="P: {trajectory_id: number}, for a group; J: what judges scored it"),
        sa.Column(
            "source",
            sa.Text,
            nullable=False,
            comment="P, J: reward | thumbs | parts | demonstration | judge | end | close",
        ),
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
        sa.Column("parts", Json, comment="P: {name: number}, weighted by the policy's settings"),
        sa.Column("demonstration", Json, comment="P: the message that would have been right"),
        sa.Column("judge", Json, comment="P: which judge is to rank the group, and by what rubric"),
        sa.Column("withdrawn_at", Utc, comment="P: when the app took it back; NULL while it stands"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_feedback"),
        sa.UniqueConstraint("project", "idempotency_key", name="uq_feedback_project_idempotency_key"),
        sa.Index("ix_feedback_project_created_at", "project", "created_at"),
        sa.Index("ix_feedback_project_trajectory_id", "project", "trajectory_id"),
        _partial_index("ix_feedback_demonstrations", "project", "created_at", "id", where="demonstration IS NOT NULL"),
        _partial_index("ix_feedback_due", "due_at", where="state = 'waiting' AND due_at IS NOT NULL"),
        _partial_index("ix_feedback_fresh", "created_at", "id", where="state = 'waiting' AND due_at IS NULL"),
        _partial_index("ix_feedback_groups", "project", "target_id", where="target_kind = 'group'"),
        _partial_index("ix_feedback_unplaced", "project", "target_id", where="trajectory_id IS NULL"),
        _partial_index(
            "ix_feedback_withdrawn",
            "withdrawn_at",
            where="withdrawn_at IS NOT NULL AND state IN ('waiting', 'applied', 'superseded')",
        ),
        comment="what apps said an attempt was worth, and what became of it",
    )
    op.create_table(
        "rubrics",
        sa.Column("project", sa.Text, nullable=False, comment="J: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="J: hash of what follows"),
        sa.Column("text", sa.Text, nullable=False, comment="J: what makes an attempt better than another"),
        sa.Column("parts", Json, comment="J: {name: weight} of the parts that are scored; NULL for one score"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_rubrics"),
        comment="what judges were told to go by",
    )
    op.create_table(
        "judgements",
        sa.Column("project", sa.Text, nullable=False, comment="J: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="J: hash of group, attempts, rubric and place"),
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
        sa.PrimaryKeyConstraint("project", "id", name="pk_judgements"),
        sa.ForeignKeyConstraint(
            ["project", "rubric_hash"], ["rubrics.project", "rubrics.id"], name="fk_judgements_rubrics"
        ),
        sa.Index("ix_judgements_project_group_id", "project", "group_id"),
        _partial_index("ix_judgements_accepted", "project", "policy", "accepted_at", where="accepted_at IS NOT NULL"),
        _partial_index("ix_judgements_cache", "project", "cache_key", where="cache_key IS NOT NULL"),
        comment="what judges said: one row for each answer that a group needs",
    )
    op.create_table(
        "judge_days",
        sa.Column("project", sa.Text, nullable=False, comment="J: the tenant"),
        sa.Column("policy", sa.Text, nullable=False, comment="J: whose groups were judged"),
        sa.Column("day", sa.Text, nullable=False, comment="J: UTC, YYYY-MM-DD"),
        sa.Column("judge", sa.Text, nullable=False, comment="J: its name in the settings"),
        sa.Column("calls", sa.Integer, nullable=False, comment="J: answers asked for"),
        sa.Column("refused", sa.Integer, nullable=False, comment="J: answers that could not be accepted"),
        sa.Column("failed", sa.Integer, nullable=False, comment="J: calls without an answer"),
        sa.Column("tokens", sa.Integer, nullable=False, comment="J: read and written"),
        sa.Column("cost_usd", sa.Float, nullable=False, comment="J: as far as prices are known"),
        sa.PrimaryKeyConstraint("project", "policy", "day", "judge", name="pk_judge_days"),
        comment="what judging took each day",
    )
    op.create_table(
        "steps",
        sa.Column("project", sa.Text, nullable=False, comment="T: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="T: `policy#number`"),
        sa.Column("policy", sa.Text, nullable=False, comment="T"),
        sa.Column("number", sa.Integer, nullable=False, comment="T: from 1, per policy"),
        sa.Column(
            "state",
            sa.Text,
            nullable=False,
            comment="T: claimed | trained | loaded | waiting_gate | promoted | rejected | noop | failed",
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
        sa.Column(
            "baselined",
            sa.Integer,
            comment="T: of its trajectories, those compared with a running mean instead of a group",
        ),
        sa.Column("kind", sa.Text, comment="T: grpo | sft; NULL of steps before there were two"),
        sa.Column("asked_at", Utc, comment="T: when it was asked for by hand; NULL where it was due by itself"),
        sa.Column("loss_function", sa.Text, comment="T: dppo_tv | cispo | dapo | grpo | dr_grpo | gspo | nll"),
        sa.Column("learning_rate", sa.Float, comment="T: the optimizer's"),
        sa.Column("advantage_spread", sa.Float, comment="T: population standard deviation over what was trained on"),
        sa.Column("completions", sa.Integer, comment="T: trained on; rows before merging"),
        sa.Column("rows", sa.Integer, comment="T: trained on, after merging"),
        sa.Column("read_tokens", sa.Integer, comment="T: tokens of the forward passes; what rows share counts once"),
        sa.Column("discarded", Json, comment="T: {reason: groups} given up when it was claimed"),
        sa.Column("kept", sa.Text, comment="T: file with the rows of a step whose numbers were not finite"),
        sa.Column("imitates", Json, comment="T: {from, min_reward, limit} of a supervised step; NULL of others"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_steps"),
        sa.ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"], name="fk_steps_policies"),
        sa.UniqueConstraint("project", "policy", "number", name="uq_steps_project_policy_number"),
        _partial_index("ix_steps_asked", "project", "policy", "asked_at", where="asked_at IS NOT NULL"),
        _partial_index("ix_steps_under_way", "project", "policy", where="ended_at IS NULL"),
        comment="one optimizer update of one policy each",
    )
    op.create_table(
        "step_trajectories",
        sa.Column("project", sa.Text, nullable=False, comment="T: the tenant"),
        sa.Column("step_id", sa.Text, nullable=False, comment="T"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="T"),
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
        sa.Column(
            "baseline", sa.Float, comment="T: the running mean its reward was compared with; NULL where its group was"
        ),
        sa.PrimaryKeyConstraint("project", "step_id", "trajectory_id", name="pk_step_trajectories"),
        sa.ForeignKeyConstraint(
            ["project", "step_id"], ["steps.project", "steps.id"], name="fk_step_trajectories_steps"
        ),
        # Once: whatever dies or is delivered twice, no second policy-gradient step of a policy takes the trajectory.
        sa.UniqueConstraint(
            "project", "policy", "trajectory_id", name="uq_step_trajectories_project_policy_trajectory_id"
        ),
        comment="what each step trained on",
    )
    op.create_table(
        "examples",
        sa.Column("project", sa.Text, nullable=False, comment="T: the tenant"),
        sa.Column("policy", sa.Text, nullable=False, comment="T: who is to learn from it"),
        sa.Column("source_id", sa.Text, nullable=False, comment="T: the feedback or the completion it was made of"),
        sa.Column("source", sa.Text, nullable=False, comment="T: demonstrations | best | the policy that answered"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="T: the trajectory it answers in"),
        sa.Column("completion_id", sa.Text, nullable=False, comment="T: the completion whose prompt it answers"),
        sa.Column(
            "prompt_token_ids", TokenIds, comment="T: rendered by vLLM, once; NULL where the completion has its own"
        ),
        sa.Column("token_ids", TokenIds, comment="T: the answer's, likewise"),
        sa.Column("left_out", sa.Text, comment="T: why it cannot be trained on; NULL where it can"),
        sa.Column("step", sa.Integer, comment="T: the last step that took it; NULL until one does"),
        sa.Column("created_at", Utc, nullable=False, comment="T"),
        sa.PrimaryKeyConstraint("project", "policy", "source_id", name="pk_examples"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_examples_policies"
        ),
        sa.Index("ix_examples_project_trajectory_id", "project", "trajectory_id"),
        comment="answers that supervised steps imitate; no policy-gradient step reads them",
    )
    op.create_table(
        "baselines",
        sa.Column("project", sa.Text, nullable=False, comment="T: the tenant"),
        sa.Column("policy", sa.Text, nullable=False, comment="T"),
        sa.Column("task", sa.Text, nullable=False, comment="T: the app's label; empty where it gave none"),
        sa.Column("end_user", sa.Text, nullable=False, comment="T: whose rewards these are; empty for everybody's"),
        sa.Column("mean", sa.Float, nullable=False, comment="T: running mean of the rewards"),
        sa.Column("count", sa.Integer, nullable=False, comment="T: rewards it was made of"),
        sa.Column("updated_at", Utc, nullable=False, comment="T"),
        sa.PrimaryKeyConstraint("project", "policy", "task", "end_user", name="pk_baselines"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_baselines_policies"
        ),
        comment="what a trajectory that is alone is compared with: running means of rewards",
    )
    op.create_table(
        "proxies",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P: one process of it"),
        sa.Column("written_until", Utc, nullable=False, comment="P: calls it finished before then are in the tables"),
        sa.Column("seen_at", Utc, nullable=False, comment="P: when it said so"),
        sa.Column("in_flight", sa.Integer, comment="P: calls that vLLM is answering for it"),
        sa.Column("waiting", sa.Integer, comment="P: calls that wait until a server can answer them"),
        sa.Column(
            "pause_seen", sa.Text, comment="P: the pause it knows of; it lets no call through to vLLM while that lasts"
        ),
        sa.PrimaryKeyConstraint("project", "id", name="pk_proxies"),
        comment="the proxy processes, so that each knows when the others' calls can be found",
    )
    op.create_table(
        "replicas",
        sa.Column("project", sa.Text, nullable=False, comment="P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="P: its address"),
        sa.Column(
            "state", sa.Text, nullable=False, comment="P: serving | behind (adapters are missing) | away | asleep"
        ),
        sa.Column("adapters", Json, comment="P: names it had loaded when it last answered"),
        sa.Column("reason", sa.Text, comment="P: why it does not serve"),
        sa.Column("seen_at", Utc, nullable=False, comment="P: when it last answered, or was first looked for"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_replicas"),
        comment="the vLLM servers, as the proxy sees them",
    )
    op.create_table(
        "gate_results",
        sa.Column("project", sa.Text, nullable=False, comment="T, P: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="T, P"),
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
        sa.PrimaryKeyConstraint("project", "id", name="pk_gate_results"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_gate_results_policies"
        ),
        sa.Index("ix_gate_results_project_policy_version_created_at", "project", "policy", "version", "created_at"),
        comment="every decision on a version, with its numbers",
    )
    op.create_table(
        "evaluations",
        sa.Column("project", sa.Text, nullable=False, comment="T: the tenant"),
        sa.Column("trajectory_id", sa.Text, nullable=False, comment="T: of the answer, which the proxy draws"),
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
        sa.PrimaryKeyConstraint("project", "trajectory_id", name="pk_evaluations"),
        sa.ForeignKeyConstraint(
            ["project", "policy"], ["policies.project", "policies.id"], name="fk_evaluations_policies"
        ),
        sa.Index("ix_evaluations_project_policy_candidate", "project", "policy", "candidate"),
        sa.Index("ix_evaluations_project_source_id", "project", "source_id"),
        _partial_index("ix_evaluations_due", "project", "trajectory_id", where="drawn_at IS NULL AND error IS NULL"),
        comment="held-out prompts that a candidate and its parent answer, to be compared",
    )
    op.create_table(
        "erasures",
        sa.Column("project", sa.Text, nullable=False, comment="W, P, J: the tenant"),
        sa.Column("id", sa.Text, nullable=False, comment="W, P, J"),
        sa.Column("kind", sa.Text, nullable=False, comment="W, P, J: trajectory | user | age"),
        sa.Column(
            "target",
            sa.Text,
            nullable=False,
            comment="W, P, J: the trajectory's id; SHA-256 of the user's name; the time before which all goes",
        ),
        sa.Column(
            "asked_at", Utc, nullable=False, comment="W, P, J: what came before then and is not in the tables yet, goes"
        ),
        sa.Column("finished_at", Utc, comment="W, P, J: when nothing of it was left; NULL until then"),
        sa.Column("trajectories", sa.Integer, nullable=False, comment="W, P, J: deleted so far"),
        sa.Column("completions", sa.Integer, nullable=False, comment="W, P, J: deleted so far"),
        sa.Column(
            "versions", Json, nullable=False, comment="W, P, J: {policy: list of versions} that have learned from it"
        ),
        sa.Column("waits_for", Json, comment="W, P, J: list of trajectories that a step has; they go when it is over"),
        sa.PrimaryKeyConstraint("project", "id", name="pk_erasures"),
        sa.Index("ix_erasures_asked_at", "asked_at"),
        sa.Index("ix_erasures_project_target", "project", "target"),
        _partial_index("ix_erasures_unfinished", "project", "asked_at", where="finished_at IS NULL"),
        comment="what was deleted, when, and who had learned from it",
    )
    dialect = op.get_bind().dialect.name
    initial_rollups.create_tables()
    for statement in (*initial_rollups.statements(dialect), *initial_views.statements(dialect)):
        # A colon begins no parameter here.
        op.execute(sa.text(statement.replace(":", r"\:")))


def _partial_index(name: str, *columns: str, where: str) -> sa.Index:
    return sa.Index(name, *columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
