"""What `/metrics` tells, in Prometheus' own format. Knows names and meanings; counts nothing."""

import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.replicas import Replicas
from proxy.store_steps import PolicySteps

OF_LAST_STEP = {
    "loss": ("whetstone_step_loss", "Loss."),
    "reward_mean": ("whetstone_step_reward_mean", "Mean reward of its trajectories."),
    "advantage_spread": ("whetstone_step_advantage_spread", "Standard deviation of the advantages it trained on."),
    "kl": ("whetstone_step_kl", "Nats a token, k3 to the base model."),
    "entropy": ("whetstone_step_entropy", "Nats a token."),
    "masked_share": ("whetstone_step_masked_share", "Share of its sampled tokens that the loss clipped or masked."),
    "mismatch_k3": ("whetstone_step_mismatch_k3", "Nats a token, k3 between server and trainer."),
    "grad_norm": ("whetstone_step_grad_norm", "Norm of the gradient before clipping."),
    "learning_rate": ("whetstone_step_learning_rate", "The optimizer's learning rate."),
    "tokens_per_s": ("whetstone_step_tokens_per_second", "Sampled tokens per second of the whole step."),
    "seconds": ("whetstone_step_seconds", "From its claim to its end."),
    "read_tokens": ("whetstone_step_read_tokens", "Tokens of its forward passes."),
}
"""Column of the last ended step -> name and meaning of its gauge."""


def exposition(
    unwritten: int,
    written_tokens: int,
    completeness: float | None,
    threaded_by: Mapping[str, int],
    reasons: Mapping[tuple[str, str], int] | None,
    steps: Sequence[PolicySteps] | None,
    others: Sequence[Metric] = (),
) -> bytes:
    """The metrics as text. What nothing can be said of (None) is left out.

    `threaded_by`: calls by the rule that found their trajectory. `reasons`: the last hour's trajectories by policy and
    why they were not trained on, "" once they were. `others`: what `records_of` and `servers_of` tell.
    """
    families: list[Metric] = [
        GaugeMetricFamily(
            "whetstone_unwritten_calls", "Calls and feedback in the journal that SQL does not have yet.", unwritten
        ),
        CounterMetricFamily(
            "whetstone_recorded_tokens", "Sampled tokens this proxy has written to SQL.", written_tokens
        ),
        _counter(
            "whetstone_calls",
            "Calls this proxy has placed, by the rule that found their trajectory.",
            ["threaded_by"],
            [((rule,), count) for rule, count in sorted(threaded_by.items())],
        ),
    ]
    if reasons is not None:
        families.append(
            _gauge(
                "whetstone_trajectories",
                "Trajectories that began within the last hour, by why no step has trained on them; empty once one has.",
                ["policy", "why_not_trained"],
                sorted(reasons.items()),
            )
        )
    if completeness is not None:
        meaning = "Sampled tokens in SQL over the increase of vllm:generation_tokens_total, since the proxy's start."
        families.append(GaugeMetricFamily("whetstone_capture_completeness", meaning, completeness))
    families += others
    if steps is not None:
        families += [*_totals(steps), *_last(steps)]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(families))
    return generate_latest(registry)


def records_of(recorder: Recorder) -> list[Metric]:
    """What the journal holds, and what nobody holds."""
    away_since_s = recorder.away_since_s
    return [
        GaugeMetricFamily("whetstone_journal_bytes", "What the journal takes.", recorder.journal_bytes),
        GaugeMetricFamily(
            "whetstone_database_away_seconds",
            "How long the database has taken nothing; 0 while it does.",
            0.0 if away_since_s is None else time.time() - away_since_s,
        ),
        CounterMetricFamily("whetstone_dropped_calls", "Calls that were answered and not recorded.", recorder.dropped),
    ]


def redaction_of(redactors: Sequence[Redactor]) -> list[Metric]:
    """What redaction could not look at, and dropped."""
    return [
        _counter(
            "whetstone_dropped_texts",
            "Texts that redaction dropped whole: it took too long, or a function of the settings failed.",
            ["reason"],
            [
                (("timed_out",), sum(one.timed_out for one in redactors)),
                (("failed",), sum(one.failed for one in redactors)),
            ],
        )
    ]


def servers_of(replicas: Replicas) -> list[Metric]:
    """How the vLLM servers are, and what is on its way to them."""
    return [
        _gauge(
            "whetstone_replica_up",
            "1 where a vLLM server answers and has all that it is to serve, else 0.",
            ["replica"],
            [((one.url,), float(one.state == "serving")) for one in replicas],
        ),
        _gauge(
            "whetstone_in_flight_calls",
            "Calls that a vLLM server is answering for this proxy.",
            ["replica"],
            [((one.url,), one.in_flight) for one in replicas],
        ),
        GaugeMetricFamily(
            "whetstone_waiting_calls", "Calls that wait until a vLLM server can answer them.", replicas.waiting
        ),
    ]


def _totals(steps: Sequence[PolicySteps]) -> list[Metric]:
    return [
        _gauge(
            "whetstone_live_version",
            "The version that answers; 0 is the base model.",
            ["policy"],
            [((one.policy,), one.live_version) for one in steps],
        ),
        _counter(
            "whetstone_steps",
            "Steps that have ended, by how.",
            ["policy", "state"],
            [((one.policy, state), count) for one in steps for state, count in sorted(one.ended.items())],
        ),
        _counter(
            "whetstone_step_sampled_tokens",
            "Sampled tokens that steps have trained on.",
            ["policy"],
            [((one.policy,), one.sampled_tokens) for one in steps],
        ),
        _counter(
            "whetstone_groups_discarded",
            "Groups given up when steps were claimed, by reason.",
            ["policy", "reason"],
            [((one.policy, reason), count) for one in steps for reason, count in sorted(one.discarded.items())],
        ),
    ]


def _last(steps: Sequence[PolicySteps]) -> list[Metric]:
    """Of each policy's last ended step."""
    rows = [("no", "completions"), ("yes", "rows")]
    return [
        *(
            _gauge(name, f"{meaning} Of the last step.", ["policy"], [((s.policy,), s.last.get(column)) for s in steps])
            for column, (name, meaning) in OF_LAST_STEP.items()
        ),
        _gauge(
            "whetstone_step_rows",
            "Completions trained on, and the rows they were merged into. Of the last step.",
            ["policy", "merged"],
            [((one.policy, merged), one.last.get(column)) for one in steps for merged, column in rows],
        ),
        _gauge(
            "whetstone_step_phase_seconds",
            "Seconds of each phase. Of the last step.",
            ["policy", "phase"],
            [((one.policy, phase), seconds) for one in steps for phase, seconds in one.phases.items()],
        ),
    ]


Samples = Iterable[tuple[Sequence[str], float | None]]
"""Label values and the figure; None is left out."""


def _gauge(name: str, meaning: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for values, figure in samples:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def _counter(name: str, meaning: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=labels)
    for values, count in samples:
        if count is not None:
            family.add_metric(values, count)
    return family


class _Told(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """What was told."""
        return self._families
