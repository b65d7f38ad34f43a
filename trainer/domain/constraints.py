"""Describe what bent the distribution that a completion's tokens were sampled from, as the proxy recorded it. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST_BIAS = 100.0
"""vLLM brings any larger bias down to it (`SamplingParams.from_optional`), in both directions."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What bent the sampling of one completion, in vLLM's names; a default changes nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """The call's own; as long as `min_tokens` holds, these and the model's are not allowed."""
    allowed_token_ids: tuple[int, ...] | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    grammar: str | None = None
    """Where its grammar comes from; which tokens it allowed is not recorded."""
    unknown: tuple[str, ...] = ()
    """Fields that this trainer cannot replay."""

    @classmethod
    def of(cls, recorded: Mapping[str, Any], stop_token_ids: Iterable[int] = ()) -> "Constraints":
        """Return the constraints that `completions.constraints` holds."""
        read: dict[str, Any] = {}
        unknown = []
        for name, value in recorded.items():
            try:
                read[name] = _READERS[name](value)
            except (KeyError, TypeError, ValueError, AttributeError):
                unknown.append(name)
        return cls(**read, stop_token_ids=tuple(stop_token_ids), unknown=tuple(sorted(unknown)))

    @property
    def truncates(self) -> bool:
        """Whether tokens were left out for their small probability."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def needs_weights(self) -> bool:
        """Whether only the version that sampled its tokens tells what was allowed."""
        return self.truncates or self.grammar is not None

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    def barred_ids(self, model_ends: Collection[int]) -> frozenset[int]:
        """Return the ids that end an answer, none of which is allowed before `min_tokens`."""
        return frozenset(self.stop_token_ids) | frozenset(model_ends)

    def decided_by_ids(self, token_ids: Sequence[int], model_ends: Collection[int]) -> tuple[bool, ...]:
        """Return for each of the completion's tokens whether lists of ids alone decided it.

        They did if they allow one token or none, and a token that they do not allow cannot be weighed either.
        """
        if self.allowed_token_ids is None and not self.min_tokens:
            return (False,) * len(token_ids)
        barred = self.barred_ids(model_ends)
        early, late = token_ids[: self.min_tokens], token_ids[self.min_tokens :]
        if self.allowed_token_ids is None:
            return (*(token_id in barred for token_id in early), *(False for _ in late))
        allowed = frozenset(self.allowed_token_ids)
        at_first = allowed - barred
        return (
            *(len(at_first) <= 1 or token_id not in at_first for token_id in early),
            *(len(allowed) <= 1 or token_id not in allowed for token_id in late),
        )


@dataclass(frozen=True, slots=True)
class ConstrainedSpan:
    """Tokens `start` to before `end` of a row: one constrained completion. The row before `start` is its prompt."""

    completion_id: str
    start: int
    end: int
    constraints: Constraints
    measured: bool = False
    """Whether the row is without its decided tokens, and has the logprobs of a grammar's others from the trainer."""
    supports: bytes = b""
    """Which tokens a truncation allowed at each token that is still trained: see `learner.constrained.supports`."""


def _bias(value: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple((int(name), min(LARGEST_BIAS, max(-LARGEST_BIAS, float(bias)))) for name, bias in value.items())


_READERS: Mapping[str, Any] = {
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "logit_bias": _bias,
    "min_tokens": int,
    "allowed_token_ids": lambda value: tuple(int(one) for one in value),
    "top_k": lambda value: max(0, int(value)),
    "top_p": float,
    "min_p": float,
    "grammar": str,
}
"""Field of `completions.constraints` -> how its value is read."""
