"""Write `/metrics` in Prometheus' own format.

The names and their meanings are in `whetstone.observability.metric_names`.
"""

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.metrics.clock import ClockJump
from proxy.metrics.rejections import refused
from proxy.metrics.store import PolicySteps, Queues
from proxy.metrics.traffic import Histogram, Traffic
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.supervision import unexpected
from proxy.upstream.load_balancer import Replicas
from proxy.upstream.spending import SpendingCap
from whetstone import __version__
from whetstone.domain.states import StepState
from whetstone.observability.metric_names import BY_NAME

OF_LAST_STEP = {
    "loss": "whetstone_step_loss",
    "reward_mean": "whetstone_step_reward_mean",
    "advantage_spread": "whetstone_step_advantage_spread",
    "kl": "whetstone_step_kl",
    "entropy": "whetstone_step_entropy",
    "masked_share": "whetstone_step_masked_share",
    "effective_share": "whetstone_step_effective_share",
    "decided_share": "whetstone_step_decided_share",
    "state_share": "whetstone_step_state_share",
    "support_disagreements": "whetstone_step_support_disagreements",
    "mismatch_k3": "whetstone_step_mismatch_k3",
    "grad_norm": "whetstone_step_grad_norm",
    "learning_rate": "whetstone_step_learning_rate",
    "tokens_per_s": "whetstone_step_tokens_per_second",
    "seconds": "whetstone_step_seconds",
    "read_tokens": "whetstone_step_read_tokens",
}
"""Column of the last ended step -> name of its gauge."""

_process = ProcessCollector(registry=None)


def exposition(families: Iterable[Metric]) -> bytes:
    """Return the metrics as text, with the kernel's figures for this process."""
    return generate_latest(_Families([*families, *_process.collect()]))


def records_of(
    recorder: Recorder, data: Path, written_tokens: int, completeness: float | None, clock: ClockJump
) -> list[Metric]:
    """Report what was recorded, what the journal holds, and what was lost. `completeness`: None if unknown."""
    away_since_s = recorder.away_since_s
    metrics = [
        _one("whetstone_info", 1.0, __version__),
        _one("whetstone_recorded_tokens", written_tokens),
        _one("whetstone_capture_completeness", completeness),
        _one("whetstone_unwritten_calls", recorder.unwritten),
        _one("whetstone_journal_bytes", recorder.journal_bytes),
        _one("whetstone_journal_full", float(recorder.journal_full)),
        _one("whetstone_clock_jump_seconds", clock.seconds()),
        _one("whetstone_database_away_seconds", 0.0 if away_since_s is None else time.time() - away_since_s),
        _one("whetstone_dropped_calls", recorder.dropped),
        _some("whetstone_unexpected_errors", [((part,), count) for part, count in sorted(unexpected.items())]),
    ]
    with suppress(OSError):  # the folder may be on a server that is down
        metrics.append(_one("whetstone_data_free_bytes", shutil.disk_usage(data).free))
    return metrics


def traffic_of(traffic: Traffic, threaded_by: Mapping[str, int]) -> list[Metric]:
    """Report requests and answers. `threaded_by`: calls by the rule that resolved their trajectory."""
    counts = traffic.snapshot()
    return [
        _some("whetstone_recorded_calls", sorted(counts.calls.items())),
        _histogram("whetstone_first_token_seconds", counts.first_token),
        _histogram("whetstone_call_seconds", counts.whole),
        _some("whetstone_prompt_tokens", _by_policy(counts.prompt_tokens)),
        _some("whetstone_sampled_tokens", _by_policy(counts.sampled_tokens)),
        _some("whetstone_refused_requests", sorted(((str(s), code), n) for (s, code), n in list(refused.items()))),
        _some("whetstone_calls", [((rule,), count) for rule, count in sorted(threaded_by.items())]),
    ]


def redaction_of(redactors: Sequence[Redactor]) -> list[Metric]:
    """Report the texts that redaction could not check and therefore dropped."""
    timed_out, failed = sum(one.timed_out for one in redactors), sum(one.failed for one in redactors)
    return [_some("whetstone_dropped_texts", [(("timed_out",), timed_out), (("failed",), failed)])]


def servers_of(replicas: Replicas) -> list[Metric]:
    """Report the state of the vLLM servers, and the calls in flight."""
    return [
        _some("whetstone_replica_up", [((one.url,), float(one.state == "serving")) for one in replicas]),
        _some("whetstone_in_flight_calls", [((one.url,), one.in_flight) for one in replicas]),
        _one("whetstone_waiting_calls", replicas.waiting),
    ]


def spending_of(spending: SpendingCap) -> list[Metric]:
    """Report what was spent today, and the cap; nothing where nothing is counted."""
    last = spending.last
    spent = [] if last is None else [(("judges",), last.judges_usd), (("upstreams",), last.upstreams_usd)]
    return [_some("whetstone_spent_usd", spent), _one("whetstone_spending_cap_usd", spending.usd_per_day)]


def queues_of(queues: Queues) -> list[Metric]:
    """Report what waits in the database, and the cost of judging."""
    judged = [
        ((day.policy, day.judge, outcome), count)
        for day in queues.judged
        for outcome, count in (
            ("accepted", day.calls - day.refused - day.failed),
            ("refused", day.refused),
            ("failed", day.failed),
        )
    ]
    took = [
        ((judge, of), seconds)
        for judge, mean_s, most_s in queues.judge_s
        for of, seconds in (("mean", mean_s), ("most", most_s))
    ]
    return [
        _some("whetstone_policy_state", [((policy, state), 1.0) for policy, state in queues.policies]),
        _one("whetstone_open_trajectories", queues.open_trajectories),
        _one("whetstone_assembly_lag_seconds", queues.assembly_lag_s),
        _one("whetstone_feedback_waiting", queues.feedback_waiting),
        _one("whetstone_feedback_without_target", queues.feedback_without_target),
        _some("whetstone_groups", [(key, count) for key, (count, _) in sorted(queues.groups.items())]),
        _some("whetstone_group_waits_seconds", [(key, waits_s) for key, (_, waits_s) in sorted(queues.groups.items())]),
        _some("whetstone_groups_waiting_for_judges", _by_policy(queues.for_judges)),
        _some("whetstone_judge_calls", judged),
        _some("whetstone_judge_tokens", [((day.policy, day.judge), day.tokens) for day in queues.judged]),
        _some("whetstone_judge_cost_usd", [((day.policy, day.judge), day.cost_usd) for day in queues.judged]),
        _some("whetstone_judge_seconds", took),
        _some("whetstone_step_running_seconds", _by_policy(queues.step_running_s)),
        _some("whetstone_step_silent_seconds", _by_policy(queues.step_silent_s)),
    ]


def reasons_of(reasons: Mapping[tuple[str, str], int]) -> list[Metric]:
    """Report the last hour's trajectories by policy and why they were not trained on; "" if they were."""
    return [_some("whetstone_trajectories", sorted(reasons.items()))]


def steps_of(steps: Sequence[PolicySteps]) -> list[Metric]:
    """Report the steps so far, and each policy's last ended one."""
    # Start at 0: if a counter first appears as 1, Prometheus misses the increase.
    none = {state.value: 0 for state in (StepState.PROMOTED, StepState.REJECTED, StepState.NOOP, StepState.FAILED)}
    ended = [((one.policy, state), count) for one in steps for state, count in sorted((none | one.ended).items())]
    discarded = [((one.policy, why), count) for one in steps for why, count in sorted(one.discarded.items())]
    rows = [
        ((one.policy, merged), one.last.get(column))
        for one in steps
        for merged, column in (("no", "completions"), ("yes", "rows"))
    ]
    phases = [((one.policy, phase), seconds) for one in steps for phase, seconds in one.phases.items()]
    return [
        _some("whetstone_live_version", [((one.policy,), one.live_version) for one in steps]),
        _some(
            "whetstone_handover_share",
            [((one.policy,), one.handover_share) for one in steps if one.handover_share is not None],
        ),
        _some("whetstone_steps", ended),
        _some("whetstone_step_sampled_tokens", [((one.policy,), one.sampled_tokens) for one in steps]),
        _some("whetstone_groups_discarded", discarded),
        *(
            _some(name, [((one.policy,), one.last.get(column)) for one in steps])
            for column, name in OF_LAST_STEP.items()
        ),
        _some("whetstone_step_rows", rows),
        _some("whetstone_step_phase_seconds", phases),
    ]


Samples = Iterable[tuple[Sequence[str], float | None]]
"""Label values and the figure; None is left out."""


def _one(name: str, figure: float | None, *values: str) -> Metric:
    return _some(name, [(values, figure)])


def _some(name: str, samples: Samples) -> Metric:
    named = BY_NAME[name]
    make = CounterMetricFamily if named.kind == "counter" else GaugeMetricFamily
    family = make(name, named.meaning, labels=named.labels)
    for values, figure in samples:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def _histogram(name: str, of_policies: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, BY_NAME[name].meaning, labels=BY_NAME[name].labels)
    for policy, one in sorted(of_policies.items()):
        family.add_metric([policy], one.buckets(), one.sum_s)
    return family


def _by_policy(figures: Mapping[str, float]) -> Samples:
    return [((policy,), figure) for policy, figure in sorted(figures.items())]


@dataclass
class _Families(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        """Return the families."""
        return self.families
