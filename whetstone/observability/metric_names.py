"""List every metric of `/metrics`: name, kind, labels and meaning.

The proxy builds its answer from this list, the docs their page, and a test checks dashboard and alerts against it.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "gauge": ("",),
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
}
"""Suffixes that Prometheus adds to the name."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, or one per combination of its labels' values."""

    name: str
    """The name without `_total` (counters) or `_bucket` (histograms)."""
    kind: Kind
    labels: tuple[str, ...]
    meaning: str

    @property
    def series_names(self) -> tuple[str, ...]:
        """The names of its time series in Prometheus."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", labels, meaning)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _histogram(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "histogram", labels, meaning)


PROXY = (
    _gauge("whetstone_info", "1; its label says which version of Whetstone this is.", "version"),
    _counter(
        "whetstone_recorded_calls",
        "Calls that this proxy has written to SQL, by how they ended: complete, aborted, error.",
        "policy",
        "endpoint",
        "status",
    ),
    _histogram(
        "whetstone_first_token_seconds",
        "From a request's arrival to the first event of its answer, of recorded calls that were streamed.",
        "policy",
    ),
    _histogram(
        "whetstone_call_seconds",
        "From a request's arrival to the last byte of its answer, of recorded calls that are complete.",
        "policy",
    ),
    _counter("whetstone_prompt_tokens", "Tokens of the prompts of recorded calls.", "policy"),
    _counter("whetstone_sampled_tokens", "Tokens sampled in recorded calls.", "policy"),
    _counter("whetstone_recorded_tokens", "Sampled tokens this proxy has written to SQL, of all policies together."),
    _counter("whetstone_refused_requests", "Requests answered with an error of the proxy's own.", "status", "code"),
    _counter(
        "whetstone_calls", "Calls this proxy has placed, by the rule that assigned their trajectory.", "threaded_by"
    ),
    _gauge(
        "whetstone_capture_completeness",
        "Sampled tokens in SQL over the increase of vllm:generation_tokens_total, since the proxy's start.",
    ),
    _gauge("whetstone_unwritten_calls", "Calls and feedback in the journal that SQL does not have yet."),
    _gauge("whetstone_journal_bytes", "What the journal takes."),
    _gauge("whetstone_journal_full", "1 where the journal takes no more: its disk refuses, or it has its most bytes."),
    _gauge("whetstone_data_free_bytes", "What is free where the data folder lies."),
    _gauge("whetstone_database_away_seconds", "How long the database has taken nothing; 0 while it does."),
    _gauge(
        "whetstone_clock_jump_seconds",
        "How far the machine's clock has moved since the proxy's start, other than by time that passed.",
    ),
    _counter("whetstone_dropped_calls", "Calls that were answered and not recorded."),
    _counter(
        "whetstone_unexpected_errors",
        "Errors outside of requests that should not happen, by the part of the proxy; the log has each with its trace.",
        "part",
    ),
    _counter(
        "whetstone_dropped_texts",
        "Texts that redaction dropped whole: it took too long, or a function of the settings failed.",
        "reason",
    ),
    _gauge("whetstone_replica_up", "1 where a vLLM server answers and has all that it is to serve, else 0.", "replica"),
    _gauge("whetstone_in_flight_calls", "Calls that a vLLM server is answering for this proxy.", "replica"),
    _gauge("whetstone_waiting_calls", "Calls that wait until a vLLM server can answer them."),
)
"""Metrics that each proxy process has of its own; across several proxies, add them up where that makes sense."""

PROCESS = (
    _gauge("process_start_time_seconds", "When the proxy process began, in seconds since 1970."),
    _counter("process_cpu_seconds", "Processor time it has taken."),
    _gauge("process_resident_memory_bytes", "Memory it holds."),
    _gauge("process_virtual_memory_bytes", "Addresses it holds."),
    _gauge("process_open_fds", "Files it has open, connections among them."),
    _gauge("process_max_fds", "Files it may open."),
)
"""Metrics of the kernel about the process, under the client library's own names."""

DATABASE = (
    _gauge("whetstone_policy_state", "1 for the state that a policy is in.", "policy", "state"),
    _gauge("whetstone_live_version", "The version that answers; 0 is the base model.", "policy"),
    _gauge("whetstone_handover_share", "Share of new trajectories that it answers in its teacher's place.", "policy"),
    _gauge(
        "whetstone_trajectories",
        "Trajectories that began within the last hour, by why no step has trained on them; empty once one has.",
        "policy",
        "why_not_trained",
    ),
    _gauge("whetstone_open_trajectories", "Trajectories that have not ended."),
    _gauge(
        "whetstone_assembly_lag_seconds",
        "Since when the oldest trajectory or feedback waits that no judging worker has looked at; 0 where none does.",
    ),
    _gauge("whetstone_feedback_waiting", "Feedback whose target is not recorded yet."),
    _gauge(
        "whetstone_feedback_without_target",
        "Feedback that arrived within the last day and failed because its target never came.",
    ),
    _gauge(
        "whetstone_groups",
        "Groups that are not over, by state: open, closed (they wait for rewards), scored (for a step), claimed.",
        "policy",
        "state",
    ),
    _gauge("whetstone_group_waits_seconds", "Since when the oldest closed or scored group is so.", "policy", "state"),
    _gauge("whetstone_groups_waiting_for_judges", "Groups that judges are to rank.", "policy"),
    _counter(
        "whetstone_judge_calls",
        "Calls of judges, by what came of them: accepted, refused (no verdict that counts), failed (no answer).",
        "policy",
        "judge",
        "outcome",
    ),
    _counter("whetstone_judge_tokens", "Tokens that judges have read and written.", "policy", "judge"),
    _counter(
        "whetstone_judge_cost_usd", "What judges have cost in dollars, as far as prices are known.", "policy", "judge"
    ),
    _gauge(
        "whetstone_spent_usd",
        "What `judges` and `upstreams` have cost today (UTC) in dollars, over all projects, as far as prices are "
        "known. None if there is no spending cap and no upstream has a price.",
        "of",
    ),
    _gauge("whetstone_spending_cap_usd", "The setting spending.usd_per_day; none without a cap."),
    _gauge(
        "whetstone_judge_seconds",
        "Of the judgements accepted within the last hour: how long a call took in the mean, and at most.",
        "judge",
        "of",
    ),
    _counter("whetstone_steps", "Steps that have ended, by how.", "policy", "state"),
    _gauge("whetstone_step_running_seconds", "Since when a worker has a step; 0 while none has.", "policy"),
    _gauge(
        "whetstone_step_silent_seconds",
        "Since when the lease of the step under way is over: its worker is silent, and no other has taken it over.",
        "policy",
    ),
    _counter("whetstone_step_sampled_tokens", "Sampled tokens that steps have trained on.", "policy"),
    _counter("whetstone_groups_discarded", "Groups given up when steps were claimed, by reason.", "policy", "reason"),
    _gauge("whetstone_step_loss", "Loss. Of the last step.", "policy"),
    _gauge("whetstone_step_reward_mean", "Mean reward of its trajectories. Of the last step.", "policy"),
    _gauge(
        "whetstone_step_advantage_spread",
        "Standard deviation of the advantages it trained on. Of the last step.",
        "policy",
    ),
    _gauge("whetstone_step_kl", "Nats a token, k3 to the base model. Of the last step.", "policy"),
    _gauge("whetstone_step_entropy", "Nats a token. Of the last step.", "policy"),
    _gauge(
        "whetstone_step_masked_share",
        "Share of its sampled tokens that the loss clipped or masked. Of the last step.",
        "policy",
    ),
    _gauge(
        "whetstone_step_effective_share",
        "Effective sample size of its sampled tokens, as a share of them. Of the last step.",
        "policy",
    ),
    _gauge(
        "whetstone_step_decided_share",
        "Share of its sampled tokens that constraints decided. Of the last step.",
        "policy",
    ),
    _gauge(
        "whetstone_step_state_share",
        "Share of its sampled tokens that were compared by state. Of the last step.",
        "policy",
    ),
    _gauge(
        "whetstone_step_support_disagreements",
        "Sampled tokens outside of what the trainer finds that a truncation allowed. Of the last step.",
        "policy",
    ),
    _gauge("whetstone_step_mismatch_k3", "Nats a token, k3 between server and trainer. Of the last step.", "policy"),
    _gauge("whetstone_step_grad_norm", "Norm of the gradient before clipping. Of the last step.", "policy"),
    _gauge("whetstone_step_learning_rate", "The optimizer's learning rate. Of the last step.", "policy"),
    _gauge(
        "whetstone_step_tokens_per_second", "Sampled tokens per second of the whole step. Of the last step.", "policy"
    ),
    _gauge("whetstone_step_seconds", "From its claim to its end. Of the last step.", "policy"),
    _gauge("whetstone_step_read_tokens", "Tokens of its forward passes. Of the last step.", "policy"),
    _gauge(
        "whetstone_step_rows",
        "Completions trained on (merged: no), and the rows they were merged into (yes). Of the last step.",
        "policy",
        "merged",
    ),
    _gauge("whetstone_step_phase_seconds", "Seconds of each phase. Of the last step.", "policy", "phase"),
)
"""Metrics from the database, about judging and training: every proxy reports the same values, so take the maximum."""

VLLM = (
    _gauge("vllm:num_requests_running", "Requests in the batches being executed.", "replica"),
    _gauge("vllm:num_requests_waiting", "Requests that wait in the server.", "replica"),
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is the whole cache.", "replica"),
    _counter("vllm:num_preemptions", "Requests put back because the KV cache was full.", "replica"),
    _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "replica"),
    _counter("vllm:prefix_cache_hits", "Of these, those that were in the cache.", "replica"),
    _counter("vllm:prompt_tokens", "Prompt tokens processed.", "replica"),
    _counter("vllm:generation_tokens", "Tokens sampled.", "replica"),
    _counter("vllm:request_success", "Requests answered, by why they ended.", "replica", "finished_reason"),
    _histogram("vllm:time_to_first_token_seconds", "From arrival in the server to the first token.", "replica"),
    _histogram("vllm:inter_token_latency_seconds", "From token to token.", "replica"),
    _histogram("vllm:e2e_request_latency_seconds", "From arrival in the server to the end.", "replica"),
    _histogram("vllm:request_queue_time_seconds", "How long requests waited in the server.", "replica"),
)
"""vLLM's own metrics, passed on because nothing else can reach vLLM. Its own labels stay."""

ALL = (*PROXY, *PROCESS, *DATABASE, *VLLM)
BY_NAME = {one.name: one for one in ALL}
