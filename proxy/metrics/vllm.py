"""Pass on vLLM's own metrics under their names, each labelled with its server."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from whetstone.observability.metric_names import VLLM

_PREFIXES = tuple(one.name for one in VLLM)
_NAMES = frozenset(_PREFIXES)


def relabelled(texts: Mapping[str, bytes]) -> list[Metric]:
    """Return the servers' metrics (address -> text of its `/metrics`) that are passed on. Unreadable text is skipped.

    The metrics of a server's several engines stay separate by their label `engine`.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        try:
            of_one = list(_passed_on(text))
        except ValueError:  # not in Prometheus' format
            continue
        for family in of_one:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "replica": replica}
                if not sample.name.endswith("_created"):
                    merged.samples.append(sample._replace(labels=labels))
    return list(families.values())


def _passed_on(text: bytes) -> Iterator[Metric]:
    """Parse only these lines: a server has five hundred, and the scraper waits."""
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.split("{", 1)[0].startswith(_WANTED)]
    yield from (family for family in text_string_to_metric_families("\n".join(lines) + "\n") if family.name in _NAMES)


_WANTED = tuple(f"{begin}{name}" for begin in ("", "# HELP ", "# TYPE ") for name in _PREFIXES)
