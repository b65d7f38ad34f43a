"""Document the admin views: every view and every column, in words. The queries are in `versions/`; a test checks that
both are equal.

docs/views.md, the comments that PostgreSQL stores, and the output of `whetstone sql` come from here. A column that
shows a table's column has the same words (`migrations.schema`), unless it has its own here.
"""

import re
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import BigInteger, Boolean, Connection, Float, Integer, Table, text

from migrations import schema
from whetstone.database.types import Json, Logprobs, TokenIds, Utc

_WRITERS = re.compile(r"^[PJTW](, [PJTW])*(: |$)")
"""The writer of a column: relevant for the table, not for readers of the view."""


class Kind(Enum):
    """What a column holds, with its type name in SQLite and in PostgreSQL."""

    TEXT = ("text", "text")
    INTEGER = ("integer", "integer")
    LARGE_INTEGER = ("integer", "bigint")
    REAL = ("real", "double precision")
    BOOLEAN = ("0 or 1", "boolean")
    TIME = ("text, UTC", "timestamptz")
    JSON = ("JSON text", "jsonb")
    TOKEN_IDS = ("JSON text", "integer[]")
    LOGPROBS = ("JSON text", "real[]")

    @property
    def is_list_or_object(self) -> bool:
        """Return whether it is a list or an object; SQLite stores these as text."""
        return self in (Kind.JSON, Kind.TOKEN_IDS, Kind.LOGPROBS)


@dataclass(frozen=True)
class ViewColumn:
    """A column and its meaning."""

    name: str
    kind: Kind
    meaning: str


@dataclass(frozen=True)
class View:
    """A view, its purpose, and its columns in the order of the database."""

    name: str
    purpose: str
    columns: tuple[ViewColumn, ...]


_DAY = (Kind.TEXT, "`YYYY-MM-DD` of `created_at`, in UTC")
_HOUR_DAY = (Kind.TEXT, "the day of `hour`, `YYYY-MM-DD`")
_COMMON = {
    "project": "the tenant",
    "policy": "name of the policy",
    "version": "number of the policy's version",
    "trajectory_id": "of `admin_trajectories`",
    "completion_id": "of `admin_completions`",
    "group_id": "of `admin_groups`",
}
"""Used where the comment of the table's column names only its writer."""

Words = str | tuple[Kind, str]


def _view(name: str, purpose: str, table: Table, columns: str, /, **words: Words) -> View:
    """Build a view. `columns`: names as the view has them, `shown=own` if the table's name differs; `words`: meanings
    that differ from the table's."""
    made = []
    for one in columns.split():
        shown, _, own = one.partition("=")
        wording = words.pop(shown, None)
        if isinstance(wording, tuple):
            made.append(ViewColumn(shown, *wording))
        else:
            column = table.columns[own or shown]
            meaning = wording or _WRITERS.sub("", column.comment or "") or _COMMON[shown]
            made.append(ViewColumn(shown, _kind(column.type), meaning))
    if words:
        raise ValueError(f"{name} has no {', '.join(words)}")
    return View(name, purpose, tuple(made))


def _kind(own: object) -> Kind:
    kinds = (
        (TokenIds, Kind.TOKEN_IDS),
        (Logprobs, Kind.LOGPROBS),
        (Utc, Kind.TIME),
        (Boolean, Kind.BOOLEAN),
        (BigInteger, Kind.LARGE_INTEGER),
        (Integer, Kind.INTEGER),
        (Float, Kind.REAL),
        (type(Json), Kind.JSON),
    )
    return next((kind for types, kind in kinds if isinstance(own, types)), Kind.TEXT)


VIEWS = (
    _view(
        "admin_policies",
        "names that apps may ask for as `model`, and which version answers",
        schema.policies,
        "project policy=id base_model live_version state model_path upstream aliases self_test self_tested_at "
        "created_at handover_teacher handover_share handover_since",
        created_at="when it was made",
        self_tested_at="when the self-test ran",
    ),
    _view(
        "admin_versions",
        "the versions of every policy: where each came from, how it was tested, and its state",
        schema.policy_versions,
        "project policy version parent state reason step origin probe_k3 heldout_mean heldout_count tested_by "
        "tested_since canary_share served pinned_at adapter_path created_at promoted_at unserved_at removed_at",
        tested_since="since when it is in that test",
        created_at="when it was made",
    ),
    _view(
        "admin_gate_results",
        "every decision on a version, with the numbers it was made on",
        schema.gate_results,
        "project policy version against test decision reason figures created_at",
        reason="why, in words",
        created_at="when it was decided",
    ),
    _view(
        "admin_completions",
        "every answer: the request, the answer with its sampled token ids and logprobs, and its tokens and times",
        schema.completions,
        "project completion_id=id upstream_id trajectory_id turn choice policy policy_version endpoint status error "
        "call_id follows key_id end_user new_messages tools response response_text why_not_trained prompt_token_ids "
        "token_ids inference_logprobs sampling finish_reason prompt_tokens completion_tokens streamed ttft_ms total_ms "
        "retry_of threaded_by redactions day created_at constraints decided_tokens explored",
        completion_id="its id, as in the header `X-Completion-Id`",
        policy_version="the version that answered",
        redactions="pieces of the call that were taken out before writing; NULL where nothing is redacted",
        response_text="the text of that message",
        streamed="whether the app asked for a stream",
        constraints="what constrained the sampling, in vLLM's names; `grammar`: its source. NULL: nothing",
        finish_reason="why it ended: stop | length | tool_calls | …; NULL of one that was broken off",
        key_id="the API key that asked, of `admin_keys`; NULL without keys",
        end_user="whom the app asked for: the body's `user`",
        day=_DAY,
    ),
    _view(
        "admin_trajectories",
        "attempts: their reward, whether they were trained on, and if not, why not",
        schema.trajectories,
        "project trajectory_id=id group_id policy task split state reward reward_source first_version last_version "
        "completions sampled_tokens why_not_trained trained_in_step metadata no_train continues end_user code_parts "
        "code_error prompt_hash day created_at last_seen_at ended_at",
        trajectory_id="its id, given by the app, else made",
        group_id="of `admin_groups`; NULL while it belongs to none",
        trained_in_step="number of the step that trained on it; NULL while none did",
        reward="the number it is trained on; NULL until scored: 0.0 is a score",
        continues="the completion that it continues, of a trajectory that had ended or was continued elsewhere",
        why_not_trained="one of docs/why_not_trained.md, as things are now; NULL once trained",
        created_at="when its first request arrived",
        ended_at="when it ended: by feedback, by an explicit end, or by idleness; NULL while it is open",
        day=_DAY,
    ),
    _view(
        "admin_conversations",
        "whole conversations: for each completion all messages before its answer, joined up from every turn",
        schema.completions,
        "project trajectory_id turn completion_id=id messages prompt_token_ids",
        messages=(Kind.JSON, "the whole conversation up to this completion's answer, which is not among them"),
        prompt_token_ids="the token ids of the whole prompt, joined up from every turn",
    ),
    _view(
        "admin_groups",
        "attempts at the same thing, and how their rewards compare",
        schema.groups,
        "project group_id=id policy formed_by state reason size rewarded reward_mean reward_spread compared_with step "
        "judged_at judge_noise judge_waits created_at closed_at",
        group_id="its id, given by the app, else made",
        created_at="when its first member began",
        closed_at="when it took no more members; NULL while it does",
    ),
    _view(
        "admin_feedback",
        "feedback of apps, people and judges, and its state",
        schema.feedback,
        "project feedback_id=id target_kind target_id choice trajectory_id completion_id reward rewards parts "
        "demonstration judge source final comment metadata key_id state reason step day created_at applied_at "
        "withdrawn_at credit",
        feedback_id="its id, as in the answer to the post",
        reward="for a trajectory or completion; of `parts` their weighted sum",
        rewards="{trajectory_id: number}, for a group: from the app, or the scores of judges",
        comment="the text that came with it",
        metadata="the JSON object that came with it",
        key_id="the API key that posted it; NULL without keys",
        created_at="when it came",
        applied_at="when it was applied to its target; NULL until then",
        day=_DAY,
    ),
    _view(
        "admin_judgements",
        "what judges scored: a row for each attempt and judgement; cost and tokens are its share: sums are right",
        schema.judgements,
        "project judgement_id=id group_id trajectory_id policy judge model purpose score explanation parts position "
        "rubric_hash attempts_hash place section cached_from cost_usd tokens calls left_out seconds day created_at "
        "accepted_at",
        trajectory_id=(Kind.TEXT, "the attempt that was scored"),
        score=(Kind.REAL, "what the judge gave it, from 0 to 1"),
        explanation=(Kind.TEXT, "why, in the judge's words"),
        parts=(Kind.JSON, "{name: score} where the rubric has parts"),
        position=(Kind.INTEGER, "its place among the attempts as the judge saw them, from 0"),
        tokens=(Kind.REAL, "its share of the tokens that the judge read and wrote"),
        cost_usd="its share of what the judgement cost; NULL where the price is unknown",
        judge="its name in the settings",
        rubric_hash="the judge's rubric, of `admin_rubrics`",
        created_at="when it was asked for",
        accepted_at="when the answer was accepted",
        day=_DAY,
    ),
    _view(
        "admin_rubrics",
        "the rubrics that judges scored by",
        schema.rubrics,
        "project rubric_hash=id text parts",
        rubric_hash="hash of the text and the parts",
    ),
    _view(
        "admin_judge_days",
        "what judging took each day, refused and failed calls included",
        schema.judge_days,
        "project policy day judge calls refused failed tokens cost_usd",
    ),
    _view(
        "admin_judge_drift",
        "how a policy's judges and its strong judge compare, by day",
        schema.judgements,
        "project policy day groups pairs agreement difference",
        day=(Kind.TEXT, "UTC, `YYYY-MM-DD`"),
        groups=(Kind.LARGE_INTEGER, "groups that both looked at"),
        pairs=(Kind.LARGE_INTEGER, "pairs of attempts within them"),
        agreement=(Kind.REAL, "share of the pairs that both rank alike; a tie is half of one"),
        difference=(Kind.REAL, "by how much the judges score higher, mean over the pairs"),
    ),
    _view(
        "admin_trajectory_hours",
        "trajectories by the hour in which they began, as they are now: sum them, an hour may have several rows",
        schema.trajectory_hours,
        "project policy version hour day split state why_not_trained trajectories ended grouped rewarded off_scale "
        "reward_sum reward_squares",
        version="the version that answered first; NULL where none did",
        day=_HOUR_DAY,
        why_not_trained="as in `admin_trajectories`, without the name behind a reason",
    ),
    _view(
        "admin_completion_hours",
        "completions by the hour in which they were asked for: sum them, an hour may have several rows",
        schema.completion_hours,
        "project hour day policy version key_id status completions prompt_tokens sampled_tokens ttft_count ttft_ms "
        "total_count total_ms",
        day=_HOUR_DAY,
        policy="the policy that answered",
        version="the version that answered",
        key_id="the API key that asked; NULL without keys",
    ),
    _view(
        "admin_feedback_hours",
        "feedback by the hour in which it came, as it is now: sum it, an hour may have several rows",
        schema.feedback_hours,
        "project hour day source state feedback rewarded reward_sum",
        day=_HOUR_DAY,
    ),
    _view(
        "admin_reviews",
        "attempts selected for people to review, without feedback so far",
        schema.trajectories,
        "project trajectory_id=id group_id policy task reward reward_source review_at",
        trajectory_id="of `admin_trajectories`",
        group_id="of `admin_groups`; NULL while it belongs to none",
        reward="as it stands",
        review_at="when it was selected",
    ),
    _view(
        "admin_steps",
        "optimizer updates: what each was made of, its figures, how long it took",
        schema.steps,
        "project policy step=number kind state version_in version_out groups trajectories baselined reward_mean "
        "reward_spread advantage_spread loss_function loss kl entropy mismatch_k3 fresh_share masked_share grad_norm "
        "learning_rate completions rows sampled_tokens read_tokens tokens_per_s seconds phases discarded config error "
        "kept attempt asked_at imitates day created_at ended_at decided_share support_disagreements "
        "state_share effective_share",
        step="its number, from 1 for each policy",
        kind="grpo | kto | dpo | hindsight | distill | sft | prefer",
        groups="how many it claimed",
        trajectories="how many it claimed",
        completions="how many it trained on; rows before merging",
        rows="how many it trained on; what completions share is merged",
        loss="the loss function's value",
        fresh_share="share of its sampled tokens that version_in answered with",
        created_at="when it claimed what it trains on",
        ended_at="when it was over; NULL until then",
        day=_DAY,
    ),
    _view(
        "admin_launches",
        "machines that were started to take steps: why, for how long, at what cost",
        schema.launches,
        "project launch=number reason steps exit_code error cost_usd created_at ended_at",
        launch="its number",
        created_at="when the command was started",
    ),
    _view(
        "admin_step_trajectories",
        "what each step took of each trajectory: the reward as it was then, its advantage, how stale it was",
        schema.step_trajectories,
        "project policy step trajectory_id group_id reward advantage baseline staleness",
        step=(Kind.INTEGER, "number of the step"),
        reward="as it was when the step claimed it",
        advantage="what it was trained on, as a mean over its sampled tokens; NULL until trained",
        staleness="updates from the oldest version that answered in it to version_in",
    ),
    _view(
        "admin_examples",
        "answers that supervised steps imitate",
        schema.examples,
        "project policy source source_id trajectory_id completion_id prompt_token_ids token_ids left_out step "
        "created_at",
        token_ids="the answer's token ids",
        created_at="when it was made",
    ),
    _view(
        "admin_baselines",
        "running means of rewards, which a trajectory that is alone is compared with",
        schema.baselines,
        "project policy task end_user mean count updated_at",
        updated_at="when a reward last moved it",
    ),
    _view(
        "admin_keys",
        "API keys, without their hashes",
        schema.api_keys,
        "project key_id=id name scopes created_at expires_at revoked_at last_used_at requests_per_min tokens_per_min",
        created_at="when it was made",
        project="the tenant that it leads to",
    ),
    _view(
        "admin_replicas",
        "the vLLM servers, as the proxy sees them",
        schema.replicas,
        "project replica=id state adapters reason seen_at",
    ),
    _view(
        "admin_erasures",
        "what was deleted, when, and which versions had learned from it",
        schema.erasures,
        "project erasure_id=id kind target asked_at finished_at trajectories completions versions waits_for",
        erasure_id="its id",
    ),
)
BY_NAME = {view.name: view for view in VIEWS}


def comment(connection: Connection) -> None:
    r"""Store the words as comments in PostgreSQL, for psql's `\d+` and other tools; SQLite has no comments."""
    for view in VIEWS:
        connection.execute(text(f"COMMENT ON VIEW {view.name} IS {_quoted(view.purpose)}"))
        for column in view.columns:
            connection.execute(text(f'COMMENT ON COLUMN {view.name}."{column.name}" IS {_quoted(column.meaning)}'))


def _quoted(words: str) -> str:
    # PostgreSQL takes no parameters here; SQLAlchemy would read a colon as one.
    return "'" + words.replace("'", "''").replace(":", r"\:") + "'"
