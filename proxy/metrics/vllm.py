"""Read vLLM's own metrics: compare its count of tokens with SQL's, and pass others on, each labelled with its server.

The tokens recorded in SQL and vLLM's counter show whether every sampled token is recorded. Both count from the proxy's
start. While answers are in flight, the share is lower than it will be. After vLLM crashes, it may be above 1, as vLLM's
last count is lost. With several proxies only the sums of both counters can be compared. With several servers the sum is
compared; each may restart, and count from zero, on its own.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import SQLAlchemyError

from proxy.metrics.patient_reader import PatientReader
from proxy.recording.store import Store
from proxy.upstream.server import Upstream
from whetstone.observability.metric_names import VLLM

GENERATED = "vllm:generation_tokens_total"
_NAMES = tuple(one.name for one in VLLM)
"""The metrics that are passed on."""
_LINES = tuple(f"{begin}{name}" for begin in ("", "# HELP ", "# TYPE ") for name in _NAMES)
"""How their lines begin."""


class Completeness:
    """The share of sampled tokens that are recorded, and its parts."""

    def __init__(
        self, servers: Mapping[str, Upstream], store: Store, projects: Sequence[str], written: Callable[[], int]
    ) -> None:
        """`written`: sampled tokens that this proxy has written to SQL since its start."""
        self._written = written
        self._servers = servers
        self._store = store
        self._projects = projects
        self._counted: dict[str, float] = {}
        """Each server's last known counter; empty before the first reading."""
        self._sampled = 0.0
        self._not_ours = 0
        """Tokens that were written and probed before the first reading of a server."""
        self._lock = asyncio.Lock()
        self._reader = PatientReader()
        self.server_texts: dict[str, bytes] = {}
        """The last metrics of each server that answers, in Prometheus' format."""

    async def share(self) -> float | None:
        """Return recorded tokens over sampled tokens, both since the first call. None if none were sampled, or if no
        server or no database answers."""
        # One at a time: otherwise the older of two readings may arrive last, and look as if the counter had dropped.
        async with self._lock:
            counted = await self._generated()
            try:
                probed = await self._reader.read(lambda: self._store.probe_tokens(self._projects))
            except SQLAlchemyError:
                return None
            if not counted or probed is None:
                return None
            recorded = self._written() + probed
            if not self._counted:
                self._not_ours, self._counted = recorded, dict(counted)
            for server, count in counted.items():
                # A counter that dropped has restarted. A new server's counter also starts at zero.
                before = self._counted.get(server, 0.0)
                self._sampled += count - before if count >= before else count
            self._counted |= counted
            return (recorded - self._not_ours) / self._sampled if self._sampled else None

    async def _generated(self) -> dict[str, float]:
        """Return what each server has sampled so far, without those that do not answer."""
        texts = await asyncio.gather(*(server.get("/metrics") for server in self._servers.values()))
        self.server_texts = {server: one for server, one in zip(self._servers, texts, strict=True) if one is not None}
        counts = {server: _count(text) for server, text in self.server_texts.items()}
        return {server: count for server, count in counts.items() if count is not None}


def relabelled(texts: Mapping[str, bytes]) -> list[Metric]:
    """Return the servers' metrics (address -> text of its `/metrics`) that are passed on. Unreadable text is skipped.

    The metrics of a server's several engines stay separate by their label `engine`.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        try:
            of_one = [family for family in _parsed(text, _LINES) if family.name in _NAMES]
        except ValueError:  # not in Prometheus' format
            continue
        for family in of_one:
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
    return list(families.values())


def _count(text: bytes) -> float | None:
    """Return the tokens that a server has sampled; None if its text is not in Prometheus' format."""
    try:
        samples = [sample for family in _parsed(text, GENERATED) for sample in family.samples]
    except ValueError:
        return None
    return sum(sample.value for sample in samples if sample.name == GENERATED)


def _parsed(text: bytes, beginnings: str | tuple[str, ...]) -> list[Metric]:
    """Parse only the lines that begin so: a server has five hundred, and the event loop or the scraper waits.

    Raises:
        ValueError: a line is not in Prometheus' format.
    """
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.startswith(beginnings)]
    return list(text_string_to_metric_families("\n".join([*lines, ""])))
