"""Is every token that vLLM sampled recorded? Compares what was written to SQL with vLLM's own counter.

Both count from the proxy's start. While answers are on their way the share lies below what it will be, after a death
of vLLM's it may lie above 1 (its last count is lost), and with several proxies only the sums of both counters compare.
"""

import asyncio
import time
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import SQLAlchemyError

from proxy.call import Call
from proxy.store import Store
from proxy.upstream import Upstream

GENERATED = "vllm:generation_tokens_total"


class Completeness:
    """The share, and what it is made of."""

    def __init__(self, vllm: Upstream, store: Store, project: str) -> None:
        self._vllm = vllm
        self._store = store
        self._project = project
        self._began_at_s = time.time()
        self._counted: float | None = None
        """vLLM's counter as it was told last; None before the first time."""
        self._sampled = 0.0
        self._not_ours = 0
        """What was written and probed before vLLM first told."""
        self._asking = asyncio.Lock()
        self.written = 0
        """Sampled tokens that this proxy has written to SQL since its start."""

    async def begin(self) -> None:
        """What vLLM has sampled up to here does not count."""
        await self.share()

    def note(self, calls: Sequence[Call]) -> None:
        """Note what was committed. Called by the writer thread."""
        # What a dead process left behind was sampled before.
        calls = [call for call in calls if call.created_at_s >= self._began_at_s]
        self.written += sum(len(choice.token_ids or ()) for call in calls for choice in call.choices)

    async def share(self) -> float | None:
        """Recorded tokens over sampled ones; None where vLLM sampled none, or it or the database does not tell."""
        # One at a time: of two, the one that was told first may arrive last, and look as if the counter fell.
        async with self._asking:
            counted = await self._generated()
            try:
                probed = await asyncio.to_thread(self._store.probe_tokens, self._project)
            except SQLAlchemyError:
                return None
            if counted is None:
                return None
            recorded = self.written + probed
            if self._counted is None:
                self._not_ours, self._counted = recorded, counted
            # A counter that fell began anew.
            self._sampled += counted - self._counted if counted >= self._counted else counted
            self._counted = counted
            return (recorded - self._not_ours) / self._sampled if self._sampled else None

    async def _generated(self) -> float | None:
        told = await self._vllm.get("/metrics")
        if told is None:
            return None
        families = text_string_to_metric_families(told.decode("utf-8", "replace"))
        try:
            return sum(sample.value for family in families for sample in family.samples if sample.name == GENERATED)
        except ValueError:  # not in Prometheus' format
            return None
