"""Define the current tables. Their history is in `versions/`; a test checks that both are equal.

Every table belongs to a project: primary keys are (project, id). Times are UTC. NULL means "not yet"; 0.0 is a
measurement. Each column names its unit and its writer: P the proxy, J the judging worker, T the training worker, W the
command line.

Admins read the `admin_*` views (created by the migrations), never these tables.
"""

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from migrations.schema_rollups import (
    COMPLETION_KEYS,
    COMPLETION_MEASURES,
    FEEDBACK_KEYS,
    FEEDBACK_MEASURES,
    TRAJECTORY_KEYS,
    TRAJECTORY_MEASURES,
    hours_and_changes,
)
from whetstone.database.types import Json, Logprobs, TokenIds, Utc

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _partial(name: str, *columns: str, where: str) -> Index:
    """Return an index on the rows that match `where`: finding due rows stays cheap, however many others there are."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


projects = Table(
    "projects",
    metadata,
    Column("id", Text, primary_key=True, comment="W: the tenant; `default` on one machine"),
    Column("created_at", Utc, nullable=False, comment="W"),
    Column("pause_id", Text, comment="T: the step that has the accelerator, which vLLM shares; NULL while vLLM has it"),
    Column("pause_until", Utc, comment="T: vLLM may have it back from then on, whatever became of the step"),
    comment="tenants",
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("project", Text, primary_key=True, comment="W, P: the tenant that it leads to"),
    Column("id", Text, primary_key=True, comment="W, P: 12 of a-z and 0-9, no secret; part of the key's text"),
    Column("name", Text, nullable=False, comment="W, P: what it is for, in words"),
    Column("secret_sha256", Text, nullable=False, comment="W, P: hash of the key's whole text, which nobody keeps"),
    Column("scopes", Json, nullable=False, comment="W, P: list of inference | feedback | admin; admin has them all"),
    Column("created_at", Utc, nullable=False, comment="W, P"),
    Column("expires_at", Utc, comment="W, P: it opens nothing from then on; NULL: it does not end by itself"),
    Column("revoked_at", Utc, comment="W, P: when it was taken back; NULL while it stands"),
    Column("last_used_at", Utc, comment="P: the minute of the last request that came with it; NULL until one has"),
    Column("requests_per_min", Integer, comment="W, P: most requests a minute; NULL: no limit"),
    Column("tokens_per_min", Integer, comment="W, P: most tokens a minute, read and sampled; NULL: no limit"),
    ForeignKeyConstraint(["project"], ["projects.id"]),
    UniqueConstraint("secret_sha256"),
    comment="API keys as hashes: what opens the proxy, and how far",
)

ui_sessions = Table(
    "ui_sessions",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant that is looked at"),
    Column("id", Text, primary_key=True, comment="P: hash of the token that the browser holds"),
    Column("key_id", Text, nullable=False, comment="P: the key that signed in; when it ends, so does this"),
    Column("created_at", Utc, nullable=False, comment="P"),
    Column("expires_at", Utc, nullable=False, comment="P: the session ends then"),
    ForeignKeyConstraint(["project"], ["projects.id"]),
    UniqueConstraint("id"),
    comment="who has signed in at the dashboard",
)

policies = Table(
    "policies",
    metadata,
    Column("project", Text, primary_key=True, comment="W: the tenant"),
    Column("id", Text, primary_key=True, comment="W: the name apps ask for as `model`"),
    Column("base_model", Text, nullable=False, comment="W: the name vLLM serves the base model under"),
    Column("model_path", Text, nullable=False, comment="W: folder or hub name of the base model's weights"),
    Column("live_version", Integer, nullable=False, comment="W, T, P: the version that answers; 0 is the base model"),
    Column("next_version", Integer, nullable=False, comment="T, W: the number the next version gets; never reused"),
    Column("next_step", Integer, nullable=False, comment="T: the number the next step gets; never reused"),
    Column("state", Text, nullable=False, comment="W: recording | training | paused"),
    Column("created_at", Utc, nullable=False, comment="W"),
    Column("upstream", Text, comment="W: another server of the settings that answers; NULL where vLLM does"),
    Column("aliases", Json, comment="W: list of other names that apps may ask for"),
    Column("self_test", Json, comment="W: what `whetstone doctor` found out about the model"),
    Column("self_tested_at", Utc, comment="W"),
    Column("step_asked", Json, comment="P: the step asked for by hand: {kind, ...}; NULL while none is"),
    Column("step_asked_at", Utc, comment="P: when it was asked for"),
    Column("handover_teacher", Text, comment="W: the policy that answers until this one is as good; NULL without one"),
    Column("handover_share", Float, comment="W, T: share of new trajectories that this policy answers meanwhile"),
    Column("handover_since", Utc, comment="W, T: since when it answers this share"),
    ForeignKeyConstraint(["project"], ["projects.id"]),
    comment="names that apps may ask for as `model`: a base model and the line of adapters trained on it",
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("project", Text, primary_key=True, comment="W, T: the tenant"),
    Column("id", Text, primary_key=True, comment="W, T: `policy@vN`; also the adapter's name in vLLM"),
    Column("policy", Text, nullable=False, comment="W, T"),
    Column("version", Integer, nullable=False, comment="W, T: 0 is the base model without adapter"),
    Column("parent", Integer, comment="T, W: the version the step started from; NULL for 0"),
    Column("state", Text, nullable=False, comment="W, T, P: building | candidate | live | retired | rejected"),
    Column("reason", Text, comment="T, P, W: why rejected"),
    Column("step", Integer, comment="T: number of the step that made it; NULL for 0"),
    Column("adapter_path", Text, comment="T, W: folder of the LoRA files; NULL for 0"),
    Column("manifest_sha256", Text, comment="T, W: hash of the folder's manifest; NULL for 0"),
    Column("served", Boolean, nullable=False, comment="T, P, W: vLLM is to keep it loaded; requests may name it"),
    Column("probe_k3", Float, comment="T: nats, k3 between vLLM and the trainer on the probe's tokens"),
    Column("created_at", Utc, nullable=False, comment="W, T"),
    Column("promoted_at", Utc, comment="W, T, P: when it last became live"),
    Column(
        "probe_tokens",
        Integer,
        comment="T, W: tokens sampled to probe it, or vLLM",
    ),
    Column("origin", Text, comment="W: where it is from if no step made it: the version it was forked from, or a path"),
    Column("pinned_at", Utc, comment="P, W: since when it is kept loaded by hand; NULL where it is not"),
    Column("unserved_at", Utc, comment="P, T, W: when requests could no longer name it; NULL while they can"),
    Column("removed_at", Utc, comment="T: when its folder was removed"),
    Column("tested_by", Text, comment="T: heldout | canary: the test that a candidate is in; NULL of others"),
    Column("tested_since", Utc, comment="T: since when"),
    Column("canary_share", Float, comment="T: share of new trajectories it answers as a candidate; NULL: none"),
    Column("heldout_mean", Float, comment="T: mean reward on the held-out prompts; NULL where it was not tested"),
    Column("heldout_count", Integer, comment="T: how many prompts that were"),
    Column("watched_at", Utc, comment="T: when its live rewards had been compared with its parent's for good"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    UniqueConstraint("project", "policy", "version"),
    comment="a policy's versions: the base model (0) and the adapters trained on it",
)

groups = Table(
    "groups",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P, J: given by the app, else made"),
    Column("policy", Text, nullable=False, comment="P, J: policy of its first completion"),
    Column("formed_by", Text, nullable=False, comment="P, J: header | prompt | choices | shadow | evaluation | single"),
    Column("state", Text, nullable=False, comment="P, J, T: open | closed | scored | claimed | trained | discarded"),
    Column("reason", Text, comment="J, T: why discarded"),
    Column("size", Integer, nullable=False, comment="J: members when it closed; 0 while open"),
    Column("rewarded", Integer, nullable=False, comment="J: members with a reward"),
    Column("reward_mean", Float, comment="J: over its rewarded members"),
    Column("reward_spread", Float, comment="J: population standard deviation over its rewarded members"),
    Column("step", Integer, comment="T: number of the step that claimed it"),
    Column("created_at", Utc, nullable=False, comment="P, J"),
    Column("closed_at", Utc, comment="J"),
    Column("due_at", Utc, comment="J: when to look at it next; NULL while nothing but a new member can move it"),
    Column("prompt_hash", Text, comment="J: of its members' first prompt, where that formed it"),
    Column("target_size", Integer, comment="P: X-Group-Size; NULL where the setting counts"),
    Column("close_asked_at", Utc, comment="J: when the app asked to close it"),
    Column(
        "compared_with", Text, comment="J: group | baseline: what its rewards are measured against; NULL until scored"
    ),
    Column("judge_asked_at", Utc, comment="J: when it was to be ranked by judges; NULL where nobody asked"),
    Column("judge_due_at", Utc, comment="J: when judges are to look at it next; NULL while they are not"),
    Column("judged_at", Utc, comment="J: when its members as they are were ranked"),
    Column("judge_noise", Float, comment="J: by how much judges differ from themselves, as a standard deviation"),
    Column("judge_waits", Text, comment="J: why it is not ranked yet"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    Index(None, "project", "policy", "state", "closed_at"),
    _partial("ix_groups_due", "due_at", where="due_at IS NOT NULL"),
    _partial("ix_groups_judge_due", "judge_due_at", where="judge_due_at IS NOT NULL"),
    _partial("ix_groups_prompt", "project", "policy", "prompt_hash", "created_at", where="prompt_hash IS NOT NULL"),
    Index(None, "project", "created_at"),
    comment="trajectories that answer the same prompt and are compared with one another",
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P: given by the app, else made"),
    Column("group_id", Text, comment="P, J: NULL while it belongs to none"),
    Column("policy", Text, nullable=False, comment="P: policy of its first completion"),
    Column("task", Text, comment="P: the app's label"),
    Column("split", Text, nullable=False, comment="P: train | eval; eval is never trained on"),
    Column("no_train", Boolean, nullable=False, comment="P: the app asked not to train on it"),
    Column("state", Text, nullable=False, comment="P, J, T: open | ended | rewarded | claimed | trained | excluded"),
    Column("reward", Float, comment="J: the number it is trained on"),
    Column(
        "reward_source",
        Text,
        comment="J: trajectory | completions | steps | group | judge | code | failure: what set it",
    ),
    Column("first_version", Integer, comment="P: policy version of its first completion"),
    Column("last_version", Integer, comment="P: policy version of its last completion"),
    Column("completions", Integer, nullable=False, comment="P: how many it has; the next turn's number"),
    Column("sampled_tokens", Integer, nullable=False, comment="P: tokens sampled in it"),
    Column("tail_completion_id", Text, comment="P: its last completion"),
    Column("why_not_trained", Text, comment="P, J, T: one of docs/why_not_trained.md; NULL once trained"),
    Column("trained_in_step", Integer, comment="T: number of the step"),
    Column("metadata", Json, comment="P: the app's JSON object"),
    Column("created_at", Utc, nullable=False, comment="P"),
    Column("last_seen_at", Utc, nullable=False, comment="P: its last completion's time; idleness counts from here"),
    Column("ended_at", Utc, comment="J"),
    Column("placed_at", Utc, comment="J: when its group was told of it; NULL until J has seen it"),
    Column("prompt_hash", Text, comment="P: of its first prompt, tools and task; those that share it are grouped"),
    Column(
        "continues",
        Text,
        comment="P: the completion it goes on from, of a trajectory that was over or went on elsewhere",
    ),
    Column("end_user", Text, comment="P: whom its first call was for"),
    Column("left_group_id", Text, comment="J: the group it was moved from; feedback on that still counts for it"),
    Column("code_parts", Json, comment="J: {name: number}, what the policy's reward functions said"),
    Column("code_error", Text, comment="J: why a reward function said nothing"),
    Column("code_due_at", Utc, comment="J: when the reward functions are to run; NULL while they are not"),
    Column("review_at", Utc, comment="J: when it was drawn for people to look at; NULL for those that were not"),
    Index(None, "project", "group_id"),
    _partial("ix_trajectories_open", "last_seen_at", where="state = 'open'"),
    _partial("ix_trajectories_unplaced", "created_at", where="placed_at IS NULL"),
    _partial("ix_trajectories_ended", "project", "ended_at", "id", where="ended_at IS NOT NULL"),
    _partial("ix_trajectories_code_due", "code_due_at", where="code_due_at IS NOT NULL"),
    _partial("ix_trajectories_review", "project", "review_at", where="review_at IS NOT NULL"),
    _partial("ix_trajectories_continues", "project", "continues", where="continues IS NOT NULL"),
    # Rewards by version and prompt, without reading the table: for comparisons of versions.
    _partial(
        "ix_trajectories_eval",
        *("project", "policy", "first_version", "prompt_hash", "created_at", "reward", "split"),
        where="split = 'eval'",
    ),
    Index(None, "project", "created_at"),
    comment="attempts at something: their completions in order, and what each attempt was worth",
)

completions = Table(
    "completions",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P"),
    Column(
        "upstream_id", Text, nullable=False, comment="P: the answer's id, as the app holds it; shared by the choices"
    ),
    Column("call_id", Text, nullable=False, comment="P: shared by the choices of one call"),
    Column("choice", Integer, nullable=False, comment="P: place among the call's choices, from 0"),
    Column("trajectory_id", Text, nullable=False, comment="P"),
    Column("turn", Integer, nullable=False, comment="P: its place in the trajectory, from 0"),
    Column("policy", Text, nullable=False, comment="P"),
    Column("policy_version", Integer, nullable=False, comment="P: the version that spoke"),
    Column("endpoint", Text, nullable=False, comment="P: chat.completions | completions | messages | responses"),
    Column("streamed", Boolean, nullable=False, comment="P"),
    Column("status", Text, nullable=False, comment="P: complete | aborted | error"),
    Column("error", Text, comment="P: what went wrong, for status error"),
    Column("follows", Text, comment="P: completion whose prompt and answer this prompt extends; NULL for a first turn"),
    Column("key_id", Text, comment="P: the API key that asked; NULL without keys"),
    Column("end_user", Text, comment="P: the body's `user`"),
    Column("new_messages", Json, comment="P: the request's messages after those of `follows` and its answer"),
    Column("tools", Json, comment="P: the request's tools where they differ from those of `follows`"),
    Column("response", Json, comment="P: the message that was answered"),
    Column("response_text", Text, comment="P: its text, where `response` does not have that as its content"),
    Column("prompt_token_ids", TokenIds, comment="P: what this turn added after `follows`; the whole prompt without"),
    Column("token_ids", TokenIds, comment="P: sampled ids, as vLLM returned them"),
    Column("inference_logprobs", Logprobs, comment="P: nats, one per sampled id, as vLLM returned them"),
    Column("sampling", Json, comment="P: the request's fields other than model, messages and tools"),
    Column("finish_reason", Text, comment="P"),
    Column("prompt_tokens", Integer, comment="P: length of the whole prompt"),
    Column("completion_tokens", Integer, comment="P: length of token_ids; of another server, as it reports"),
    Column("ttft_ms", Float, comment="P: milliseconds from request to first event; NULL unless streamed"),
    Column("total_ms", Float, comment="P: milliseconds from request to last byte"),
    Column("retry_of", Text, comment="P: the completion this one repeats"),
    Column(
        "threaded_by", Text, nullable=False, comment="P: the rule that found the trajectory, one of docs/whose_call.md"
    ),
    Column("why_not_trained", Text, comment="P: what this completion lacks; NULL when it can be trained on"),
    Column("created_at", Utc, nullable=False, comment="P: when the request arrived"),
    Column("request_digest", Text, comment="P: hash of a body not answered whole; its retry is found by it"),
    Column("turn_key", Text, comment="P: X-Turn-Id or Idempotency-Key; asked again, the answer is the same"),
    Column("reply", LargeBinary, comment="P: the answer as sent, where turn_key may ask for it again"),
    Column(
        "history",
        LargeBinary,
        comment="P: 20 bytes, hashes of the prompt (8) and of prompt and answer; what extends it is found by it, and "
        "what repeats its answer in other words by the first part",
    ),
    Column("tool_history", LargeBinary, comment="P: 16 bytes, hash of the tool calls it made, ids included; likewise"),
    Column("continued_by", Text, comment="P: the first whole completion that extends it; NULL while none does"),
    Column("redactions", Integer, comment="P: pieces of its call taken out before writing; NULL where nobody looked"),
    Column(
        "constraints",
        Json,
        comment="P: what bends the distribution that its tokens were sampled from: vLLM's own parameters, and "
        "`grammar` with its source; NULL if nothing does",
    ),
    Column(
        "decided_tokens",
        Integer,
        comment="T: sampled tokens that its constraints decided: a step learns nothing from them; NULL until a "
        "step has measured it",
    ),
    Column(
        "explored",
        Float,
        comment="P: the temperature that its policy explored with, where the app set 0; NULL if it did not explore",
    ),
    Column(
        "stored_response",
        Json,
        comment="P: what a stored response has that is in no other column; NULL if no request may name it",
    ),
    ForeignKeyConstraint(["project", "trajectory_id"], ["trajectories.project", "trajectories.id"]),
    UniqueConstraint("project", "trajectory_id", "turn"),
    Index(None, "project", "upstream_id"),
    Index(None, "project", "created_at"),
    _partial("ix_completions_unanswered", "project", "request_digest", where="request_digest IS NOT NULL"),
    _partial("ix_completions_turn_key", "project", "turn_key", where="turn_key IS NOT NULL"),
    _partial("ix_completions_history", "project", "history", "id", where="history IS NOT NULL"),
    _partial("ix_completions_tool_history", "project", "tool_history", "id", where="tool_history IS NOT NULL"),
    _partial("ix_completions_retry_of", "project", "retry_of", where="retry_of IS NOT NULL"),
    comment="one choice of a served call each, with the very ids and logprobs vLLM returned",
)

answer_ids = Table(
    "answer_ids",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("completion_id", Text, primary_key=True, comment="P: the completion whose answer has it"),
    Column("id", Text, primary_key=True, comment="P: of a tool call or an item, as the app holds it"),
    ForeignKeyConstraint(["project", "completion_id"], ["completions.project", "completions.id"]),
    Index(None, "project", "id"),
    comment="ids within answers, by which feedback may name a completion",
)

feedback = Table(
    "feedback",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P"),
    Column("target_kind", Text, nullable=False, comment="P: trajectory | completion | group"),
    Column("target_id", Text, nullable=False, comment="P: as the app gave it"),
    Column("trajectory_id", Text, comment="J: the trajectory it was applied to; NULL for a group"),
    Column("completion_id", Text, comment="J: the completion it was applied to; NULL for a trajectory or a group"),
    Column("choice", Integer, nullable=False, comment="P: which choice of a `chatcmpl-` id"),
    Column("reward", Float, comment="P: for a trajectory or completion; J: the weighted sum of its parts"),
    Column("rewards", Json, comment="P: {trajectory_id: number}, for a group; J: what judges scored it"),
    Column(
        "source",
        Text,
        nullable=False,
        comment="P, J: reward | thumbs | parts | demonstration | comment | judge | end | close",
    ),
    Column("final", Boolean, nullable=False, comment="P: it ends the trajectory"),
    Column("comment", Text, comment="P"),
    Column("metadata", Json, comment="P"),
    Column("idempotency_key", Text, comment="P"),
    Column("key_id", Text, comment="P"),
    Column(
        "state",
        Text,
        nullable=False,
        comment="P, J, T: waiting | applied | superseded | withdrawn | used | unused | failed",
    ),
    Column("reason", Text, comment="J, T: why unused or failed"),
    Column("step", Integer, comment="T: number of the step that trained on it"),
    Column("created_at", Utc, nullable=False, comment="P"),
    Column("applied_at", Utc, comment="J"),
    Column("due_at", Utc, comment="J: when to look for its target again; NULL until it was looked for once"),
    Column("parts", Json, comment="P: {name: number}, weighted by the policy's settings"),
    Column("demonstration", Json, comment="P: the message that would have been right"),
    Column("judge", Json, comment="P: which judge is to rank the group, and by what rubric"),
    Column("withdrawn_at", Utc, comment="P: when the app took it back; NULL while it stands"),
    Column("credit", Text, comment="P: `step`: earned at this completion, not by the attempt as a whole; else NULL"),
    UniqueConstraint("project", "idempotency_key"),
    _partial("ix_feedback_fresh", "created_at", "id", where="state = 'waiting' AND due_at IS NULL"),
    _partial("ix_feedback_due", "due_at", where="state = 'waiting' AND due_at IS NOT NULL"),
    _partial("ix_feedback_groups", "project", "target_id", where="target_kind = 'group'"),
    _partial(
        "ix_feedback_withdrawn",
        "withdrawn_at",
        where="withdrawn_at IS NOT NULL AND state IN ('waiting', 'applied', 'superseded')",
    ),
    _partial("ix_feedback_failed", "project", "created_at", where="state = 'failed'"),
    _partial("ix_feedback_demonstrations", "project", "created_at", "id", where="demonstration IS NOT NULL"),
    _partial("ix_feedback_unplaced", "project", "target_id", where="trajectory_id IS NULL"),
    Index(None, "project", "trajectory_id"),
    Index(None, "project", "created_at"),
    comment="what apps said an attempt was worth, and what became of it",
)

rubrics = Table(
    "rubrics",
    metadata,
    Column("project", Text, primary_key=True, comment="J: the tenant"),
    Column("id", Text, primary_key=True, comment="J: hash of what follows"),
    Column("text", Text, nullable=False, comment="J: what makes an attempt better than another"),
    Column("parts", Json, comment="J: {name: weight} of the parts that are scored; NULL for one score"),
    comment="what judges were told to go by",
)

judgements = Table(
    "judgements",
    metadata,
    Column("project", Text, primary_key=True, comment="J: the tenant"),
    Column("id", Text, primary_key=True, comment="J: hash of group, attempts, rubric and place"),
    Column("group_id", Text, nullable=False, comment="J"),
    Column("policy", Text, nullable=False, comment="J: the group's"),
    Column("attempts_hash", Text, nullable=False, comment="J: hash of the attempts and the rubric it is about"),
    Column("place", Integer, nullable=False, comment="J: which of the group's judgements, from 0"),
    Column("section", Integer, nullable=False, comment="J: which part of a large group it is about, from 0"),
    Column("purpose", Text, nullable=False, comment="J: reward | drift: whether its scores make rewards"),
    Column("state", Text, nullable=False, comment="J: waiting | accepted"),
    Column("judge", Text, nullable=False, comment="J: its name in the settings; of a waiting one, who is asked next"),
    Column("model", Text, comment="J: as its provider calls the one that answered"),
    Column("rubric_hash", Text, nullable=False, comment="J: id of its rubric"),
    Column("cache_key", Text, comment="J: equal where the answer may be used again; NULL until accepted"),
    Column("cached_from", Text, comment="J: the judgement whose answer this one uses again"),
    Column(
        "scores",
        Json,
        comment="J: {trajectory_id: {score, explanation, parts, position, attempt, turns}}; position as shown, from 0",
    ),
    Column("calls", Integer, nullable=False, comment="J: answers asked for"),
    Column("refusals", Integer, nullable=False, comment="J: answers of `judge` that were refused"),
    Column("error", Text, comment="J: why the last call gave nothing"),
    Column("left_out", Integer, nullable=False, comment="J: characters of the attempts that it was not shown"),
    Column("prompt_tokens", Integer, nullable=False, comment="J: over all its calls, as the provider counts"),
    Column("completion_tokens", Integer, nullable=False, comment="J: likewise"),
    Column("cost_usd", Float, comment="J: over all its calls; NULL where the price is unknown"),
    Column("seconds", Float, comment="J: of the call that was accepted"),
    Column("created_at", Utc, nullable=False, comment="J"),
    Column("accepted_at", Utc, comment="J"),
    ForeignKeyConstraint(["project", "rubric_hash"], ["rubrics.project", "rubrics.id"]),
    Index(None, "project", "group_id"),
    _partial("ix_judgements_cache", "project", "cache_key", where="cache_key IS NOT NULL"),
    _partial("ix_judgements_accepted", "project", "policy", "accepted_at", where="accepted_at IS NOT NULL"),
    comment="what judges said: one row for each answer that a group needs",
)

judge_days = Table(
    "judge_days",
    metadata,
    Column("project", Text, primary_key=True, comment="J: the tenant"),
    Column("policy", Text, primary_key=True, comment="J: whose groups were judged"),
    Column("day", Text, primary_key=True, comment="J: UTC, YYYY-MM-DD"),
    Column("judge", Text, primary_key=True, comment="J: its name in the settings"),
    Column("calls", Integer, nullable=False, comment="J: answers asked for"),
    Column("refused", Integer, nullable=False, comment="J: answers that could not be accepted"),
    Column("failed", Integer, nullable=False, comment="J: calls without an answer"),
    Column("tokens", Integer, nullable=False, comment="J: read and written"),
    Column("cost_usd", Float, nullable=False, comment="J: as far as prices are known"),
    comment="what judging took each day",
)

# What dashboards show, and changes that are not in it yet: read the views `admin_*_hours`, and sum.
trajectory_hours, trajectory_changes = hours_and_changes(
    metadata,
    "trajectory",
    "trajectories",
    TRAJECTORY_KEYS,
    TRAJECTORY_MEASURES,
    Index(None, "project", "policy", "version"),
)
completion_hours, completion_changes = hours_and_changes(
    metadata, "completion", "completions", COMPLETION_KEYS, COMPLETION_MEASURES
)
feedback_hours, feedback_changes = hours_and_changes(metadata, "feedback", "feedback", FEEDBACK_KEYS, FEEDBACK_MEASURES)

steps = Table(
    "steps",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("id", Text, primary_key=True, comment="T: `policy#number`"),
    Column("policy", Text, nullable=False, comment="T"),
    Column("number", Integer, nullable=False, comment="T: from 1, per policy"),
    Column(
        "state",
        Text,
        nullable=False,
        comment="T: claimed | trained | loaded | waiting_gate | promoted | rejected | noop | failed",
    ),
    Column("version_in", Integer, nullable=False, comment="T: the version it starts from"),
    Column("version_out", Integer, comment="T: the version it makes"),
    Column("groups", Integer, nullable=False, comment="T: claimed"),
    Column("trajectories", Integer, nullable=False, comment="T: claimed"),
    Column("reward_mean", Float, comment="T: over its trajectories"),
    Column("reward_spread", Float, comment="T: population standard deviation over its trajectories"),
    Column("loss", Float, comment="T"),
    Column("kl", Float, comment="T: nats a token, k3 to the base model"),
    Column("entropy", Float, comment="T: nats a token, of the trainer's distribution at sampled positions"),
    Column("mismatch_k3", Float, comment="T: nats a token, k3 between inference and trainer over tokens of version_in"),
    Column("fresh_share", Float, comment="T: share of its sampled tokens that version_in spoke"),
    Column("masked_share", Float, comment="T: share of its sampled tokens the loss masked out"),
    Column("grad_norm", Float, comment="T: before clipping"),
    Column("sampled_tokens", Integer, comment="T: tokens trained on"),
    Column("tokens_per_s", Float, comment="T: sampled tokens per second of the whole step"),
    Column("seconds", Float, comment="T: from claim to promotion"),
    Column("phases", Json, comment="T: {phase: seconds}"),
    Column("config", Json, nullable=False, comment="T: the trainer's settings it ran with"),
    Column("error", Text, comment="T: why failed, rejected or without a version"),
    Column("attempt", Integer, nullable=False, comment="T: fencing token; grows with each claim of the same step"),
    Column("lease_until", Utc, comment="T: another worker may take it over from then on; NULL when over"),
    Column("created_at", Utc, nullable=False, comment="T"),
    Column("ended_at", Utc, comment="T"),
    Column(
        "baselined", Integer, comment="T: of its trajectories, those compared with a running mean instead of a group"
    ),
    Column("kind", Text, comment="T: grpo | kto | dpo | hindsight | distill | sft | prefer; NULL where there was one"),
    Column("asked_at", Utc, comment="T: when it was asked for by hand; NULL where it was due by itself"),
    Column(
        "loss_function",
        Text,
        comment="T: dppo_tv | cispo | dapo | grpo | dr_grpo | gspo | kto | dpo | divergence | nll",
    ),
    Column("learning_rate", Float, comment="T: the optimizer's"),
    Column("advantage_spread", Float, comment="T: population standard deviation over what was trained on"),
    Column("completions", Integer, comment="T: trained on; rows before merging"),
    Column("rows", Integer, comment="T: trained on, after merging"),
    Column("read_tokens", Integer, comment="T: tokens of the forward passes; what rows share counts once"),
    Column("discarded", Json, comment="T: {reason: groups} given up when it was claimed"),
    Column("kept", Text, comment="T: file with the rows of a step whose numbers were not finite"),
    Column(
        "imitates",
        Json,
        comment="T: {from, min_reward, limit} of a step on answers, words, a teacher, or of what it replays; else NULL",
    ),
    Column(
        "decided_share",
        Float,
        comment="T: share of its sampled tokens that constraints decided; NULL where nothing constrained them",
    ),
    Column(
        "support_disagreements",
        Integer,
        comment="T: sampled tokens outside of what the trainer finds that a truncation allowed; NULL where nothing "
        "constrained them",
    ),
    Column(
        "state_share",
        Float,
        comment="T: share of its sampled tokens that were compared by state; NULL with the baseline `group`",
    ),
    Column(
        "effective_share",
        Float,
        comment="T: effective sample size of its sampled tokens, as a share of them; NULL where it imitates",
    ),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    UniqueConstraint("project", "policy", "number"),
    _partial("ix_steps_under_way", "project", "policy", where="ended_at IS NULL"),
    _partial("ix_steps_asked", "project", "policy", "asked_at", where="asked_at IS NOT NULL"),
    comment="one optimizer update of one policy each",
)

launches = Table(
    "launches",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the home project"),
    Column("number", Integer, primary_key=True, comment="T: from 1"),
    Column("reason", Text, nullable=False, comment="T: which policy had what to do"),
    Column(
        "steps",
        Integer,
        comment="T: steps of all projects that made a version, or ended without one, while it ran; NULL until then",
    ),
    Column("exit_code", Integer, comment="T: of the command; below 0 the signal that ended it; NULL until then"),
    Column("error", Text, comment="T: why it did not start, how it failed, or that it took no step; else NULL"),
    Column("cost_usd", Float, comment="T: hours times `launcher.usd_per_hour`; NULL where that is not set"),
    Column("created_at", Utc, nullable=False, comment="T: when the command was started"),
    Column("ended_at", Utc, comment="T: when it ended; NULL until then"),
    ForeignKeyConstraint(["project"], ["projects.id"]),
    comment="runs of the launcher's command, each with its cost",
)

step_trajectories = Table(
    "step_trajectories",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("step_id", Text, primary_key=True, comment="T"),
    Column("trajectory_id", Text, primary_key=True, comment="T"),
    Column("policy", Text, nullable=False, comment="T"),
    Column("group_id", Text, nullable=False, comment="T"),
    Column("reward", Float, nullable=False, comment="T: frozen when the step claimed it"),
    Column("advantage", Float, comment="T: NULL until trained"),
    Column("staleness", Integer, nullable=False, comment="T: updates from the oldest version that spoke to version_in"),
    Column("baseline", Float, comment="T: the running mean its reward was compared with; NULL where its group was"),
    ForeignKeyConstraint(["project", "step_id"], ["steps.project", "steps.id"]),
    # Once only: even if a worker dies or a message is redelivered, no second policy-gradient step of a policy takes the
    # same trajectory.
    UniqueConstraint("project", "policy", "trajectory_id"),
    comment="what each step trained on",
)

examples = Table(
    "examples",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("policy", Text, primary_key=True, comment="T: who is to learn from it"),
    Column(
        "source_id",
        Text,
        primary_key=True,
        comment="T: its feedback or completion, and by kind `/hindsight`, `/prefer` or `/distill/<teacher>`",
    ),
    Column(
        "source",
        Text,
        nullable=False,
        comment="T: demonstrations | best | comments | judge | tools | replies, or the name of the policy or teacher",
    ),
    Column("trajectory_id", Text, nullable=False, comment="T: the trajectory it answers in"),
    Column("completion_id", Text, nullable=False, comment="T: the completion whose prompt it answers"),
    Column("prompt_token_ids", TokenIds, comment="T: rendered by vLLM, once; NULL where the completion has its own"),
    Column("token_ids", TokenIds, comment="T: the answer's, likewise"),
    Column("left_out", Text, comment="T: why it cannot be trained on; NULL where it can"),
    Column("step", Integer, comment="T: the last step that took it; NULL until one does"),
    Column("created_at", Utc, nullable=False, comment="T"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    Index(None, "project", "trajectory_id"),
    comment="answers that steps imitate or prefer, that words correct or teachers score; none is weighed by its reward",
)

baselines = Table(
    "baselines",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("policy", Text, primary_key=True, comment="T"),
    Column("task", Text, primary_key=True, comment="T: the app's label; empty where it gave none"),
    Column("end_user", Text, primary_key=True, comment="T: whose rewards these are; empty for everybody's"),
    Column("mean", Float, nullable=False, comment="T: running mean of the rewards"),
    Column("count", Integer, nullable=False, comment="T: rewards it was made of"),
    Column("updated_at", Utc, nullable=False, comment="T"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    comment="what a trajectory that is alone is compared with: running means of rewards",
)

proxies = Table(
    "proxies",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P: one process of it"),
    Column("written_until", Utc, nullable=False, comment="P: calls it finished before then are in the tables"),
    Column("seen_at", Utc, nullable=False, comment="P: when it said so"),
    Column("in_flight", Integer, comment="P: calls that vLLM is answering for it"),
    Column("waiting", Integer, comment="P: calls that wait until a server can answer them"),
    Column("pause_seen", Text, comment="P: the pause it knows of; it lets no call through to vLLM while that lasts"),
    comment="the proxy processes, so that each knows when the others' calls can be found",
)

replicas = Table(
    "replicas",
    metadata,
    Column("project", Text, primary_key=True, comment="P: the tenant"),
    Column("id", Text, primary_key=True, comment="P: its address"),
    Column("state", Text, nullable=False, comment="P: serving | behind (adapters are missing) | away | asleep"),
    Column("adapters", Json, comment="P: names it had loaded when it last answered"),
    Column("reason", Text, comment="P: why it does not serve"),
    Column("seen_at", Utc, nullable=False, comment="P: when it last answered, or was first looked for"),
    comment="the vLLM servers, as the proxy sees them",
)

gate_results = Table(
    "gate_results",
    metadata,
    Column("project", Text, primary_key=True, comment="T, P: the tenant"),
    Column("id", Text, primary_key=True, comment="T, P"),
    Column("policy", Text, nullable=False, comment="T, P"),
    Column("version", Integer, nullable=False, comment="T, P: the version that was decided on"),
    Column("against", Integer, comment="T, P: the version it was compared with, or that took its place"),
    Column(
        "test", Text, nullable=False, comment="T, P, W: probe | retention | heldout | canary | watch | handover | hand"
    ),
    Column(
        "decision",
        Text,
        nullable=False,
        comment="T, P, W: pass | reject | testing | promote | rollback | pin | unpin | begin | raise | lower | stay",
    ),
    Column("reason", Text, comment="T, P: in words"),
    Column("figures", Json, comment="T: what it was decided on: {name: number}"),
    Column("created_at", Utc, nullable=False, comment="T, P"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    Index(None, "project", "policy", "version", "created_at"),
    comment="every decision on a version, with its numbers",
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("trajectory_id", Text, primary_key=True, comment="T: of the answer, which the proxy draws"),
    Column("policy", Text, nullable=False, comment="T"),
    Column("candidate", Integer, nullable=False, comment="T: the version that is tested"),
    Column(
        "version", Integer, nullable=False, comment="T: the version that is to answer: the candidate, or its parent"
    ),
    Column("source_id", Text, nullable=False, comment="T: the completion whose prompt it is"),
    Column("group_id", Text, nullable=False, comment="T: the group of both answers to it"),
    Column("drawn_at", Utc, comment="P: when it was answered; NULL while it is due"),
    Column("error", Text, comment="P: why it cannot be answered"),
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    Index(None, "project", "policy", "candidate"),
    Index(None, "project", "source_id"),
    _partial("ix_evaluations_due", "project", "trajectory_id", where="drawn_at IS NULL AND error IS NULL"),
    comment="held-out prompts that a candidate and its parent answer, to be compared",
)

erasures = Table(
    "erasures",
    metadata,
    Column("project", Text, primary_key=True, comment="W, P, J: the tenant"),
    Column("id", Text, primary_key=True, comment="W, P, J"),
    Column("kind", Text, nullable=False, comment="W, P, J: trajectory | user | age"),
    Column(
        "target",
        Text,
        nullable=False,
        comment="W, P, J: the trajectory's id; SHA-256 of the user's name; the time before which all goes",
    ),
    Column(
        "asked_at", Utc, nullable=False, comment="W, P, J: what came before then and is not in the tables yet, goes"
    ),
    Column("finished_at", Utc, comment="W, P, J: when nothing of it was left; NULL until then"),
    Column("trajectories", Integer, nullable=False, comment="W, P, J: deleted so far"),
    Column("completions", Integer, nullable=False, comment="W, P, J: deleted so far"),
    Column("versions", Json, nullable=False, comment="W, P, J: {policy: list of versions} that have learned from it"),
    Column("waits_for", Json, comment="W, P, J: list of trajectories that a step has; they go when it is over"),
    Index(None, "project", "target"),
    Index(None, "asked_at"),
    _partial("ix_erasures_unfinished", "project", "asked_at", where="finished_at IS NULL"),
    comment="what was deleted, when, and who had learned from it",
)

erased_responses = Table(
    "erased_responses",
    metadata,
    Column("project", Text, primary_key=True, comment="W, P, J: the tenant"),
    Column("id", Text, primary_key=True, comment="W, P, J: the answer's id, as an app may still hold it"),
    Column("erased_at", Utc, nullable=False, comment="W, P, J"),
    Index(None, "project", "erased_at"),
    comment="ids of stored responses that were deleted with their trajectories, to say so to a request for one",
)
