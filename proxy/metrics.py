"""What `/metrics` tells, in Prometheus' own format. Knows names and meanings; counts nothing."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def exposition(
    unwritten: int,
    written_tokens: int,
    completeness: float | None,
    threaded_by: Mapping[str, int],
    reasons: Mapping[tuple[str, str], int] | None,
) -> bytes:
    """The metrics as text. What nothing can be said of (None) is left out.

    `threaded_by`: calls by the rule that found their trajectory. `reasons`: the last hour's trajectories by policy and
    why they were not trained on, "" once they were.
    """
    threaded = CounterMetricFamily(
        "whetstone_calls",
        "Calls this proxy has placed, by the rule that found their trajectory.",
        labels=["threaded_by"],
    )
    for rule, count in sorted(threaded_by.items()):
        threaded.add_metric([rule], count)
    families: list[Metric] = [
        GaugeMetricFamily("whetstone_unwritten_calls", "Calls in the journal that SQL does not have yet.", unwritten),
        CounterMetricFamily(
            "whetstone_recorded_tokens", "Sampled tokens this proxy has written to SQL.", written_tokens
        ),
        threaded,
    ]
    if reasons is not None:
        trajectories = GaugeMetricFamily(
            "whetstone_trajectories",
            "Trajectories that began within the last hour, by why no step has trained on them; empty once one has.",
            labels=["policy", "why_not_trained"],
        )
        for labels, count in sorted(reasons.items()):
            trajectories.add_metric(labels, count)
        families.append(trajectories)
    if completeness is not None:
        meaning = "Sampled tokens in SQL over the increase of vllm:generation_tokens_total, since the proxy's start."
        families.append(GaugeMetricFamily("whetstone_capture_completeness", meaning, completeness))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(families))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """What was told."""
        return self._families
