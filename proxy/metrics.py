"""What `/metrics` tells, in Prometheus' own format. Knows names and meanings; counts nothing."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def exposition(unwritten: int, written_tokens: int, completeness: float | None) -> bytes:
    """The metrics as text. Completeness is left out where nothing can be said of it."""
    families: list[Metric] = [
        GaugeMetricFamily("whetstone_unwritten_calls", "Calls in the journal that SQL does not have yet.", unwritten),
        CounterMetricFamily(
            "whetstone_recorded_tokens", "Sampled tokens this proxy has written to SQL.", written_tokens
        ),
    ]
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
