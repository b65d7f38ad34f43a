"""Is every token that vLLM sampled recorded? Compares what was written to SQL with vLLM's own counter.

Both count from the proxy's start. While answers are on their way the share lies below what it will be, after a death
of vLLM's it may lie above 1 (its last count is lost), and with several proxies only the sums of both counters compare.
Of several servers the sum is compared; each may start again, and count from zero, by itself.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import SQLAlchemyError

from proxy.call import Call
from proxy.store import Store
from proxy.upstream import Upstream

GENERATED = "vllm:generation_tokens_total"


class Completeness:
    """The share, and what it is made of."""

    def __init__(self, servers: Mapping[str, Upstream], store: Store, projects: Sequence[str]) -> None:
        self._servers = servers
        self._store = store
        self._projects = projects
        self._began_at_s = time.time()
        self._counted: dict[str, float] = {}
        """Each server's counter as it was told last; none before the first time."""
        self._sampled = 0.0
        self._not_ours = 0
        """What was written and probed before a server first told."""
        self._asking = asyncio.Lock()
        self.told: dict[str, bytes] = {}
        """What each server that answers told last, in Prometheus' format."""
        self.written = 0
        """Sampled tokens that this proxy has written to SQL since its start."""

    async def begin(self) -> None:
        """What vLLM has sampled up to here does not count."""
        await self.share()

    def note(self, calls: Sequence[Call]) -> None:
        """Note what was committed. Called by the writer thread."""
        # What a dead process left behind was sampled before.
        self.written += sum([call.sampled_tokens for call in calls if call.created_at_s >= self._began_at_s])

    async def share(self) -> float | None:
        """Recorded tokens over sampled ones; None where none were sampled, or no server or database tells."""
        # One at a time: of two, the one that was told first may arrive last, and look as if the counter fell.
        async with self._asking:
            counted = await self._generated()
            try:
                probed = await asyncio.to_thread(self._store.probe_tokens, self._projects)
            except SQLAlchemyError:
                return None
            if not counted:
                return None
            recorded = self.written + probed
            if not self._counted:
                self._not_ours, self._counted = recorded, dict(counted)
            for server, count in counted.items():
                # A counter that fell began anew, and so did a server's that comes to the others.
                before = self._counted.get(server, 0.0)
                self._sampled += count - before if count >= before else count
            self._counted |= counted
            return (recorded - self._not_ours) / self._sampled if self._sampled else None

    async def _generated(self) -> dict[str, float]:
        """What each server has sampled so far; nothing of those that do not tell."""
        told = await asyncio.gather(*(server.get("/metrics") for server in self._servers.values()))
        self.told = {server: one for server, one in zip(self._servers, told, strict=True) if one is not None}
        counts = zip(self._servers, (None if one is None else _count(one) for one in told), strict=True)
        return {server: count for server, count in counts if count is not None}


def _count(told: bytes) -> float | None:
    # Of five hundred lines these: the event loop waits.
    lines = [line for line in told.decode("utf-8", "replace").splitlines() if line.startswith(GENERATED)]
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    try:
        return sum(sample.value for family in families for sample in family.samples if sample.name == GENERATED)
    except ValueError:  # not in Prometheus' format
        return None
