"""The tables as they are. How they got there stands in `versions/`; a test holds the two equal.

Every table belongs to a project: primary keys are (project, id). Times are UTC. NULL means "not yet"; 0.0 is a
measurement. Each column says its unit and who writes it: P the proxy, J the judging worker, T the training worker,
W the command line.

Admins read the `admin_*` views (made by the migrations), never these tables.
"""

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ARRAY,
    JSON,
    REAL,
    Boolean,
    Column,
    DateTime,
    Dialect,
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
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Utc(TypeDecorator[datetime]):
    """An instant. `timestamptz` on PostgreSQL; ISO text in UTC on SQLite, so that plain SQL can compare it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse an instant without a zone (ValueError): it would be off by the machine's own."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give the instant its zone back (SQLite forgets it)."""
        return value if value is None or value.tzinfo else value.replace(tzinfo=UTC)


class _Numbers(TypeDecorator[list[Any]]):
    """A list of numbers: an array on PostgreSQL, JSON text on SQLite (no function unpacks a blob there)."""

    impl = Text
    cache_ok = True
    element: type[TypeEngine[Any]] = Integer

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(ARRAY(self.element))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: list[Any] | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        return json.dumps(value, separators=(",", ":"), allow_nan=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> list[Any] | None:
        decoded: list[Any] | None = json.loads(value) if isinstance(value, str) else value
        return decoded


class TokenIds(_Numbers):
    """Token ids, in order."""

    cache_ok = True
    element = Integer


class Logprobs(_Numbers):
    """Natural logarithms of probabilities, float32, one per token id."""

    cache_ok = True
    element = REAL


Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def _partial(name: str, *columns: str, where: str) -> Index:
    """An index on the rows that `where` keeps: what is due stays cheap to find however much is over."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


projects = Table(
    "projects",
    metadata,
    Column("id", Text, primary_key=True, comment="W: the tenant; `default` on one machine"),
    Column("created_at", Utc, nullable=False, comment="W"),
    comment="tenants",
)

policies = Table(
    "policies",
    metadata,
    Column("project", Text, primary_key=True, comment="W: the tenant"),
    Column("id", Text, primary_key=True, comment="W: the name apps ask for as `model`"),
    Column("base_model", Text, nullable=False, comment="W: the name vLLM serves the base model under"),
    Column("model_path", Text, nullable=False, comment="W: folder or hub name of the base model's weights"),
    Column("live_version", Integer, nullable=False, comment="W, T: the version that answers; 0 is the base model"),
    Column("next_version", Integer, nullable=False, comment="T: the number the next version gets; never reused"),
    Column("next_step", Integer, nullable=False, comment="T: the number the next step gets; never reused"),
    Column("state", Text, nullable=False, comment="W: recording | training | paused"),
    Column("created_at", Utc, nullable=False, comment="W"),
    Column("upstream", Text, comment="W: another server of the settings that answers; NULL where vLLM does"),
    Column("aliases", Json, comment="W: list of other names that apps may ask for"),
    Column("self_test", Json, comment="W: what `whetstone doctor` found out about the model"),
    Column("self_tested_at", Utc, comment="W"),
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
    Column("parent", Integer, comment="T: the version the step started from; NULL for 0"),
    Column("state", Text, nullable=False, comment="W, T: building | candidate | live | retired | rejected"),
    Column("reason", Text, comment="T: why rejected"),
    Column("step", Integer, comment="T: number of the step that made it; NULL for 0"),
    Column("adapter_path", Text, comment="T: folder of the LoRA files; NULL for 0"),
    Column("manifest_sha256", Text, comment="T: hash of the folder's manifest; NULL for 0"),
    Column("served", Boolean, nullable=False, comment="T: vLLM is to keep it loaded; requests may name it"),
    Column("probe_k3", Float, comment="T: nats, k3 between vLLM and the trainer on the probe's tokens"),
    Column("created_at", Utc, nullable=False, comment="W, T"),
    Column("promoted_at", Utc, comment="W, T: when it last became live"),
    Column(
        "probe_tokens",
        Integer,
        comment="T, W: tokens sampled to probe it, or vLLM",
    ),
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
    Column("formed_by", Text, nullable=False, comment="P, J: header | prompt | choices | shadow | single"),
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
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    Index(None, "project", "policy", "state", "closed_at"),
    _partial("ix_groups_due", "due_at", where="due_at IS NOT NULL"),
    _partial("ix_groups_prompt", "project", "policy", "prompt_hash", "created_at", where="prompt_hash IS NOT NULL"),
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
    Column("reward_source", Text, comment="J: trajectory | completions | group | code | failure: what set it"),
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
    Index(None, "project", "group_id"),
    _partial("ix_trajectories_open", "last_seen_at", where="state = 'open'"),
    _partial("ix_trajectories_unplaced", "created_at", where="placed_at IS NULL"),
    _partial("ix_trajectories_ended", "project", "ended_at", "id", where="ended_at IS NOT NULL"),
    _partial("ix_trajectories_code_due", "code_due_at", where="code_due_at IS NOT NULL"),
    _partial("ix_trajectories_continues", "project", "continues", where="continues IS NOT NULL"),
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
    Column("response_text", Text, comment="P: its content"),
    Column("prompt_token_ids", TokenIds, comment="P: what this turn added after `follows`; the whole prompt without"),
    Column("token_ids", TokenIds, comment="P: sampled ids, as vLLM returned them"),
    Column("inference_logprobs", Logprobs, comment="P: nats, one per sampled id, as vLLM returned them"),
    Column("sampling", Json, comment="P: the request's fields other than model, messages and tools"),
    Column("finish_reason", Text, comment="P"),
    Column("prompt_tokens", Integer, comment="P: length of the whole prompt"),
    Column("completion_tokens", Integer, comment="P: length of token_ids"),
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
        "history", LargeBinary, comment="P: 16 bytes, hash of conversation and answer; what extends it is found by it"
    ),
    Column("tool_history", LargeBinary, comment="P: 16 bytes, hash of the tool calls it made, ids included; likewise"),
    Column("continued_by", Text, comment="P: the first whole completion that extends it; NULL while none does"),
    ForeignKeyConstraint(["project", "trajectory_id"], ["trajectories.project", "trajectories.id"]),
    UniqueConstraint("project", "trajectory_id", "turn"),
    Index(None, "project", "upstream_id"),
    Index(None, "project", "created_at"),
    _partial("ix_completions_unanswered", "project", "request_digest", where="request_digest IS NOT NULL"),
    _partial("ix_completions_turn_key", "project", "turn_key", where="turn_key IS NOT NULL"),
    _partial("ix_completions_history", "project", "history", "id", where="history IS NOT NULL"),
    _partial("ix_completions_tool_history", "project", "tool_history", "id", where="tool_history IS NOT NULL"),
    comment="one choice of a served call each, with the very ids and logprobs vLLM returned",
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
    Column("rewards", Json, comment="P: {trajectory_id: number}, for a group"),
    Column("source", Text, nullable=False, comment="P: reward | thumbs | parts | demonstration | judge | end | close"),
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
    UniqueConstraint("project", "idempotency_key"),
    _partial("ix_feedback_fresh", "created_at", "id", where="state = 'waiting' AND due_at IS NULL"),
    _partial("ix_feedback_due", "due_at", where="state = 'waiting' AND due_at IS NOT NULL"),
    _partial("ix_feedback_groups", "project", "target_id", where="target_kind = 'group'"),
    _partial(
        "ix_feedback_withdrawn",
        "withdrawn_at",
        where="withdrawn_at IS NOT NULL AND state IN ('waiting', 'applied', 'superseded')",
    ),
    Index(None, "project", "trajectory_id"),
    comment="what apps said an attempt was worth, and what became of it",
)

steps = Table(
    "steps",
    metadata,
    Column("project", Text, primary_key=True, comment="T: the tenant"),
    Column("id", Text, primary_key=True, comment="T: `policy#number`"),
    Column("policy", Text, nullable=False, comment="T"),
    Column("number", Integer, nullable=False, comment="T: from 1, per policy"),
    Column(
        "state", Text, nullable=False, comment="T: claimed | trained | loaded | promoted | rejected | noop | failed"
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
    ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.id"]),
    UniqueConstraint("project", "policy", "number"),
    comment="one optimizer update of one policy each",
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
    # Once: whatever dies or is redelivered, no second policy-gradient step of a policy takes the same trajectory.
    UniqueConstraint("project", "policy", "trajectory_id"),
    comment="what each step trained on",
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
    comment="the proxy processes, so that each knows when the others' calls can be found",
)
