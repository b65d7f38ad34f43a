"""Count the calls recorded in SQL: how many, how long, how many tokens. The writer thread counts them in its batches.

So the event loop, which apps wait for, does not have to.
"""

import copy
import itertools
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.domain.call import Call
from whetstone.domain.why_not_trained import WhyNotTrained

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass
class Histogram:
    """A histogram of seconds, by upper bounds."""

    bounds_s: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)
    """For each bound's place, the values up to it and above the one before; last, the values above all bounds."""
    sum_s: float = 0.0

    def note(self, seconds: Sequence[float]) -> None:
        """Add these values."""
        self.counts.update([bisect_left(self.bounds_s, one) for one in seconds])
        self.sum_s = sum(seconds, self.sum_s)

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative buckets in Prometheus' form: the bound, and the number of values up to it."""
        names = [*(str(bound) for bound in self.bounds_s), "+Inf"]
        up_to = itertools.accumulate(self.counts[place] for place in range(len(names)))
        return [(name, float(count)) for name, count in zip(names, up_to, strict=True)]


@dataclass
class TrafficCounts:
    """Everything counted since the process started."""

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Policy, endpoint and status -> calls."""
    prompt_tokens: Counter[str] = field(default_factory=Counter)
    sampled_tokens: Counter[str] = field(default_factory=Counter)
    of_vllm: int = 0
    """Those of `sampled_tokens` that vLLM sampled, whatever the policy."""
    first_token: dict[str, Histogram] = field(default_factory=dict)
    whole: dict[str, Histogram] = field(default_factory=dict)


class Traffic:
    """The counts, written by one thread and read by another."""

    def __init__(self) -> None:
        self._began_at_s = time.time()
        self._lock = threading.Lock()
        self._counts = TrafficCounts()

    def note(self, calls: Sequence[Call]) -> None:
        """Count committed calls, except those left behind by an earlier process, whose times are not from this run."""
        fresh = [call for call in calls if call.created_at_s >= self._began_at_s]
        policies = {call.policy for call in fresh}
        with self._lock:
            for policy in policies:
                self._note(policy, fresh if len(policies) == 1 else [call for call in fresh if call.policy == policy])

    def _note(self, policy: str, calls: Sequence[Call]) -> None:
        counts = self._counts
        counts.sampled_tokens[policy] += sum([call.sampled_tokens for call in calls])
        counts.of_vllm += sum([call.sampled_tokens for call in calls if call.bent != WhyNotTrained.DEMONSTRATION])
        counts.prompt_tokens[policy] += sum([call.read_tokens for call in calls])
        # A request with several prompts is one call for each: times and answers are counted for the first one.
        firsts = [call for call in calls if not call.first_id]
        counts.calls.update([(policy, call.endpoint, call.status) for call in firsts])
        if begun := [call.ttft_ms / 1000 for call in firsts if call.ttft_ms is not None]:
            counts.first_token.setdefault(policy, Histogram(FIRST_TOKEN_S)).note(begun)
        if whole := [call.total_ms / 1000 for call in firsts if call.status == "complete"]:
            counts.whole.setdefault(policy, Histogram(WHOLE_S)).note(whole)

    def sampled_tokens(self) -> int:
        """Return the number of tokens that vLLM has sampled so far, for all policies."""
        with self._lock:
            return self._counts.of_vllm

    def snapshot(self) -> TrafficCounts:
        """Return a copy of the counts so far, for one reader."""
        with self._lock:
            return copy.deepcopy(self._counts)
