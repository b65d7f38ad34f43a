"""Hold the answers of the policy that a teacher is to score."""

from dataclasses import dataclass

from trainer.domain.rows import Answer


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """An answer that the policy sampled."""

    trajectory_id: str
    answer: Answer
    """As logged; its source is its example."""
    left_out: str | None = None
    """Why it teaches nothing; None where it does, or was not tried yet."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """A teacher's K likeliest tokens at each of the N tokens of an answer."""

    ids_N: tuple[tuple[int, ...], ...]
    logprobs_N: tuple[tuple[float, ...], ...]
    """Nats."""
